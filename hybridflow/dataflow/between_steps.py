"""Work that must not happen within a step, asked for from other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from hybridflow.dataflow.state import DONE, StateConflict

Tell = Callable[[str, str], None]


@dataclass(frozen=True)
class Errand:
    """One piece of work.

    Attributes:
        text: what is done, for the record.
        work: ValueError or OSError when it cannot be done and nothing has changed.
    """

    text: str
    work: Callable[[], None]


class BetweenSteps:
    """At most one errand of a name waits; ``run`` does all that wait. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Errand] = {}
        self._ended: dict[str, str] = {}

    def ask(self, name: str, errand: Errand) -> None:
        """Have it done before the next step; StateConflict while another one of ``name`` waits."""
        with self._lock:
            if name in self._waiting:
                raise StateConflict(f"{self._waiting[name].text} is to happen before the next step")
            self._waiting[name] = errand

    def run(self, kind: str, tell: Tell) -> None:
        """Do what waits, and tell how each ended as an event of ``kind``."""
        with self._lock:
            waiting = dict(self._waiting)  # each stays until it has ended, for `status` and `ask`
        for name, errand in waiting.items():
            try:
                errand.work()
                text = errand.text + DONE
            except (ValueError, OSError) as error:
                text = f"{errand.text}: failed; {error}"
            with self._lock:
                self._ended[name] = text
                del self._waiting[name]
            tell(kind, text)

    def status(self, name: str) -> str:
        """What waits under a name, or how the last one ended; empty where there was none."""
        with self._lock:
            if name in self._waiting:
                return f"{self._waiting[name].text}: before the next step"
            return self._ended.get(name, "")
