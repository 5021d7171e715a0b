"""Which engines of a fleet serve, and how those that failed come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from hybridflow.rollout.background import in_background
from hybridflow.rollout.engines import (
    Engine,
    EngineFault,
    EngineState,
    FleetEvent,
    fault_of,
)

MOST_REPAIRS = 3
"""An engine is lost when so many repairs in a row have failed."""

AnyEngine = TypeVar("AnyEngine", bound=Engine)


@dataclass(eq=False)
class Member(Generic[AnyEngine]):
    """An engine and what the fleet knows of it.

    Attributes:
        fault: why it does not serve.
        failed_repairs: since it last served.
        busy_until: when all of its open requests must be answered (monotonic clock).
    """

    engine: AnyEngine
    state: EngineState = EngineState.SERVING
    fault: EngineFault | None = None
    failed_repairs: int = 0
    busy_until: float = 0.0


class Roster(Generic[AnyEngine]):
    """The engines by state. Threads may share it.

    Args:
        withdraw: is told, with ``lock`` held, that a member serves no more; what it returns is
            called once the event was told.
        repair, repair_seconds, on_event: see ``Fleet``.

    Attributes:
        lock: held while a state changes; hold it to act on states as they are.
        version: that serving engines hold.
    """

    def __init__(
        self,
        engines: Sequence[AnyEngine],
        repair: Callable[[AnyEngine], int],
        repair_seconds: float,
        on_event: Callable[[FleetEvent], None],
        withdraw: Callable[[Member[AnyEngine], EngineFault], Callable[[], None]],
        version: int,
    ) -> None:
        self.members = {engine.name: Member(engine) for engine in engines}
        assert self.members and len(self.members) == len(engines), "names are unique"
        self.lock = threading.RLock()
        self.version = version
        self._repair, self._repair_seconds = repair, repair_seconds
        self._tell = on_event
        self._withdraw = withdraw
        self._one_repair = threading.Lock()

    def serving(self) -> list[Member[AnyEngine]]:
        """The members that take requests."""
        return self._in_state(EngineState.SERVING)

    def _in_state(self, state: EngineState) -> list[Member[AnyEngine]]:
        with self.lock:
            return [member for member in self.members.values() if member.state is state]

    def account(self) -> str:
        """Each engine that does not serve, why, and the end of its log."""
        with self.lock:
            return "\n".join(
                f"{name} ({member.state}): {member.fault}"
                for name, member in self.members.items()
                if member.fault is not None
            )

    def quarantine(self, member: Member[AnyEngine], fault: EngineFault) -> None:
        """See ``Fleet.quarantine``."""
        with self.lock:
            if member.state is not EngineState.SERVING:
                return
            member.state, member.fault, member.busy_until = EngineState.QUARANTINED, fault, 0.0
            notify = self._withdraw(member, fault)
        name = member.engine.name
        try:
            self._tell(FleetEvent("quarantine", name, f"{name}: {fault.reason}", fault.log))
        finally:  # whoever waits must hear of it, also where the event cannot be written
            notify()

    def repair(self) -> None:
        """See ``Fleet.repair``."""
        with self._one_repair:
            with self.lock:
                broken = self._in_state(EngineState.QUARANTINED)
                for member in broken:
                    member.state = EngineState.REPAIRING
            repairs = [(member, self._begin_repair(member)) for member in broken]
            done = wait([repair for _, repair in repairs], self._repair_seconds).done
            for member, repair in repairs:
                self._end_repair(member, repair if repair in done else None)

    def _begin_repair(self, member: Member[AnyEngine]) -> Future[int]:
        name = member.engine.name
        turn = f"{member.failed_repairs + 1} of {MOST_REPAIRS}"
        self._tell(FleetEvent("repair", name, f"{name}: repair {turn} begins"))
        return in_background(f"repair-{name}", partial(self._repair, member.engine))

    def _end_repair(self, member: Member[AnyEngine], repair: Future[int] | None) -> None:
        """Re-admit the engine, or note why not; ``repair`` is None past the deadline."""
        name = member.engine.name
        with self.lock:
            fault = self._repair_fault(repair)
            if fault is None:
                member.state, member.fault = EngineState.SERVING, None
                member.failed_repairs = 0
                event = FleetEvent("readmission", name, f"{name} serves version {self.version}")
            else:
                event = self._still_broken(member, fault)
        self._tell(event)

    def _repair_fault(self, repair: Future[int] | None) -> EngineFault | None:
        """What is wrong with a repair's end; None when the engine may serve again."""
        if repair is None:
            return EngineFault(f"the repair did not end within {self._repair_seconds:g} s")
        if error := repair.exception():
            return fault_of(error)
        if repair.result() != self.version:
            return EngineFault(
                f"it came back with version {repair.result()}; version {self.version} is served"
            )
        return None

    def _still_broken(self, member: Member[AnyEngine], fault: EngineFault) -> FleetEvent:
        name = member.engine.name
        member.failed_repairs += 1
        lost = member.failed_repairs >= MOST_REPAIRS
        member.state = EngineState.LOST if lost else EngineState.QUARANTINED
        # The first cause stays readable beneath the failures of its repairs.
        before = f"{fault.log}\nBefore: {member.fault}".strip()
        member.fault = EngineFault(f"repair {member.failed_repairs} failed: {fault.reason}", before)
        kind = "lost" if lost else "quarantine"
        return FleetEvent(kind, name, f"{name}: {member.fault.reason}", fault.log)
