"""The run's live values: what may be changed while it goes on, and by how much.

The recipe says where each value begins and never changes. A change is checked as a whole,
gets a version and a record, and comes into force between two steps: within a step every reader
sees the same values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.monitor import read_events
from hybridflow.recipe.registry import Registry

DONE = ": done"
"""After the text of what was asked for between steps, once it has been done."""

_MOST_SHOWN = 80


@dataclass(frozen=True)
class LiveValue:
    """A value that a run reads anew in every step.

    Attributes:
        start: where the recipe lets it begin; an ``int`` makes it a whole number for good.
        low, high: bounds, both allowed.
        never: numbers between the bounds that are refused.
        fixed: why nobody may change it in this run; empty where one may.
        role: whose it is; empty for the run's.
    """

    name: str
    start: float
    low: float
    high: float
    description: str = ""
    never: tuple[float, ...] = ()
    fixed: str = ""
    role: str = ""

    def __post_init__(self) -> None:
        if problem := self.problem(self.start):
            raise ValueError(f"{problem}; it is where the recipe lets the run begin")

    def problem(self, value: Any) -> str | None:
        """Why ``value`` does not fit, or None."""
        whole = isinstance(self.start, int)
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or value != value:
            kind = "whole" if whole else "finite"
            return f"'{self.name}' is a {kind} number, not {repr(value)[:_MOST_SHOWN]}"
        if not self.low <= value <= self.high or value in self.never:
            besides = f" and never {', '.join(map(str, self.never))}" if self.never else ""
            return (
                f"'{self.name}' = {repr(value)[:_MOST_SHOWN]} is out of bounds: it is between "
                f"{self.low:g} and {self.high:g}{besides}"
            )
        return None


@dataclass(frozen=True)
class Change:
    """A change that was accepted, in force from the next step on.

    Attributes:
        by: who asked for it.
        rule: whether a rule of the recipe did, which may move it in every step.
        values: name -> value before and after.
    """

    version: int
    by: str
    values: Mapping[str, tuple[float, float]]
    rule: bool = False

    def __str__(self) -> str:
        moves = ", ".join(f"{name} {old:g} -> {new:g}" for name, (old, new) in self.values.items())
        return f"version {self.version} by {self.by}: {moves}, from the next step on"


class StateConflict(ValueError):
    """The change meets another one, or a value that this run does not let go."""


class SharedState:
    """Live values by name. Safe to use from several threads.

    Args:
        record: is told each change, in the order of their versions.
    """

    def __init__(
        self, values: Iterable[LiveValue], record: Callable[[Change], None] = lambda change: None
    ) -> None:
        self.declared = {value.name: value for value in values}
        self._record = record
        self._lock = threading.Lock()
        self._accepted: dict[str, float] = {v.name: v.start for v in self.declared.values()}
        self._in_force = dict(self._accepted)
        self._moved: frozenset[str] = frozenset()
        self._version = 0
        self._version_in_force = 0

    def __getitem__(self, name: str) -> float:
        """The value in force."""
        return self._in_force[self._known(name)]

    def __contains__(self, name: object) -> bool:
        return name in self.declared

    @property
    def version(self) -> int:
        """Of the latest accepted change; 0 before the first."""
        return self._version

    @property
    def version_in_force(self) -> int:
        """Of the values that this step reads."""
        return self._version_in_force

    def change(self, values: Mapping[str, Any], by: str, expected: int | None = None) -> int:
        """Accept all of ``values`` or none; they come into force with the next ``apply``.

        Args:
            expected: version that the change was made for; None: any.

        Returns:
            The version that the values now have; values as they were make no new one.

        Raises:
            StateConflict: ``expected`` is past, or this run lets nobody change a value.
            ValueError: an unknown name, or a value out of its bounds; every one is named.
        """
        with self._lock:
            self._check(values, expected)
            return self._accept(values, by)

    def revise(self, name: str, rule: Callable[[float], float], by: str) -> int:
        """Accept ``rule(value)``, held within the bounds; ``value`` is the latest accepted one."""
        with self._lock:
            value = self.declared[self._known(name)]
            new = min(max(rule(self._accepted[name]), value.low), value.high)
            return self._accept({name: new}, by, rule=True)

    def apply(self) -> None:
        """Bring what was accepted into force; called between steps alone."""
        with self._lock:
            self._in_force = dict(self._accepted)
            self._version_in_force = self._version

    def begin(self, values: Mapping[str, float], by: str) -> None:
        """Where a stage begins, in force at once; a change where one has been made before, so that
        what it undoes is seen."""
        with self._lock:
            self._check(values, None, fixed_too=True)
            self._accept({n: v for n, v in values.items() if n in self._moved}, by)
            self._accepted |= values
            self._in_force = {**self._in_force, **values}

    def put(self, **values: float) -> None:
        """What the run itself counts: in force at once, without a version."""
        with self._lock:
            self._check(values, None, fixed_too=True)
            self._accepted |= values
            self._in_force = {**self._in_force, **values}

    def moved(self) -> dict[str, float]:
        """The values in force of all names that a change has ever touched."""
        return {name: self._in_force[name] for name in sorted(self._moved)}

    def in_force(self) -> dict[str, float]:
        """Every value that this step reads."""
        return dict(self._in_force)

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Every value by name: in force, accepted, bounds, and why it is fixed, if it is."""
        with self._lock:
            return {
                name: {
                    "value": self._in_force[name],
                    "next": self._accepted[name],
                    "low": value.low,
                    "high": value.high,
                    "description": value.description,
                    **({"fixed": value.fixed} if value.fixed else {}),
                }
                for name, value in self.declared.items()
            }

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds: the accepted values and their version, as plain numbers."""
        with self._lock:
            values, moved = dict(self._accepted), sorted(self._moved)
            return {"version": self._version, "values": values, "moved": moved}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from ``saved``.

        Raises:
            ValueError: it holds a value that this run does not have, or one out of its bounds.
        """
        with self._lock:
            values, version, moved = (saved.get(key) for key in ("values", "version", "moved"))
            if (
                not isinstance(values, dict)
                or type(version) is not int
                or not isinstance(moved, list)
            ):
                raise ValueError(f"no saved live values: {saved!r}")
            self._check(values, None, fixed_too=True)
            self._accepted |= values
            self._in_force = dict(self._accepted)
            self._moved = frozenset(self._known(name) for name in moved)
            self._version = self._version_in_force = version

    def _accept(self, values: Mapping[str, float], by: str, rule: bool = False) -> int:
        old = self._accepted
        moved = {name: (old[name], new) for name, new in values.items() if new != old[name]}
        if moved:
            version = self._version + 1
            self._record(Change(version, by, moved, rule))  # what is not recorded is not accepted
            self._version = version
            self._moved = self._moved | moved.keys()
            self._accepted = {**old, **{name: new for name, (_, new) in moved.items()}}
        return self._version

    def _check(
        self, values: Mapping[str, Any], expected: int | None, fixed_too: bool = False
    ) -> None:
        if expected is not None and expected != self._version:
            raise StateConflict(
                f"the change is for version {expected}, but the live values have version "
                f"{self._version} by now; read them again"
            )
        for name in values:
            self._known(name)
        problems = [self.declared[name].problem(value) for name, value in values.items()]
        if found := [problem for problem in problems if problem]:
            raise ValueError("; ".join(found))
        held = [self.declared[n] for n in values if self.declared[n].fixed and not fixed_too]
        if held:
            raise StateConflict("; ".join(f"'{v.name}' is fixed: {v.fixed}" for v in held))

    def _known(self, name: str) -> str:
        if name not in self.declared:
            raise ValueError(
                f"there is no live value '{name}'; "
                f"{Registry('live value', self.declared).advice(name)}"
            )
        return name


def changes_after(checkpoint: Path, folder: Path) -> list[str]:
    """Reloads, and changes of live values but for those of rules, that a run made after a
    checkpoint from which it goes on now: they are in force no more, and nobody has been told.

    Args:
        folder: of the run.
    """
    since: list[str] = []
    for event in read_events(folder):
        if event["kind"] == "resume" or (
            event["kind"] == "checkpoint" and Path(event["text"]).name == checkpoint.name
        ):
            since = []
        elif event["kind"] == "state" and not event.get("rule"):
            since.append(event["text"])
        elif event["kind"] == "reload" and event["text"].endswith(DONE):
            since.append(event["text"].removesuffix(DONE))
    return since
