"""The latest step of a run and its age, for whoever asks from another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepRecord:
    """What a step measured, as it is recorded.

    Attributes:
        step: of the stage, counted from 1; 0 before the first.
        global_step: over all stages.
    """

    stage: str = ""
    step: int = 0
    global_step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    node_seconds: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class Pulse:
    """Beats once a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = StepRecord()
        self._at = time.monotonic()
        self._latest: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def beat(self, record: StepRecord, added: Mapping[str, float]) -> None:
        """A step has ended, which adds to counters."""
        with self._lock:
            before = self._latest if record.stage == self._last.stage else {}
            self._last, self._at = record, time.monotonic()
            self._latest = {**before, **record.metrics}
            sums = {name: self._totals.get(name, 0.0) + value for name, value in added.items()}
            self._totals = {**self._totals, **sums}

    def since_the_start(self) -> tuple[dict[str, float], dict[str, float]]:
        """The last value of each metric of the stage, and the counters."""
        with self._lock:
            return self._latest, self._totals

    def last(self) -> tuple[StepRecord, float]:
        """The latest step and its age in seconds; before the first, that of the run."""
        with self._lock:
            return self._last, time.monotonic() - self._at
