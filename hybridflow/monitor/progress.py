"""What the console shows: the state of a run after its latest step, and the time left."""

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridflow.monitor.text import duration, number

# label, metric: in the order shown
HEADLINE = (
    ("reward", "reward/mean"),
    ("eval", "eval/reward"),
    ("kl", "update/kl"),
    ("loss", "update/loss"),
    ("accuracy", "update/reward_accuracy"),
    ("eval loss", "eval/loss"),
    ("eval accuracy", "eval/reward_accuracy"),
    ("grad", "update/grad_norm"),
    ("length", "length/mean"),
    ("tok/s", "throughput/tokens_per_second"),
)


@dataclass
class Progress:
    """The latest step of a run. ``totals`` are the steps of each stage; a step counts from 1.

    ``evaluated`` keeps the stage's latest evaluation, which not every step makes.
    """

    totals: Mapping[str, int]
    stage: str = ""
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    node_seconds: dict[str, float] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=60))
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    _stage_began: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)

    def advance(
        self,
        step: int,
        stage: str,
        metrics: Mapping[str, float],
        node_seconds: Mapping[str, float],
        seconds: float | None = None,
    ) -> None:
        """Take in a finished step; ``seconds`` is its wall time, by default since the last one."""
        now = time.monotonic()
        if stage != self.stage:
            self._enter(stage)
        self._durations.append(now - self._last if seconds is None else seconds)
        self._last = now
        self.step = step
        self.evaluated.update({k: float(v) for k, v in metrics.items() if k.startswith("eval/")})
        self.metrics = {name: float(value) for name, value in metrics.items()}
        self.node_seconds = {name: float(value) for name, value in node_seconds.items()}
        if "reward/mean" in metrics:
            self.rewards.append(float(metrics["reward/mean"]))

    def _enter(self, stage: str) -> None:
        self.stage = stage
        self.evaluated.clear()
        self.rewards.clear()
        self._durations.clear()
        self._stage_began = self._last

    @property
    def total(self) -> int | None:
        """Steps of this stage, None when it is not known."""
        return self.totals.get(self.stage)

    @property
    def step_seconds(self) -> float | None:
        """Median wall time of the latest steps."""
        return statistics.median(self._durations) if self._durations else None

    @property
    def elapsed(self) -> float:
        """Seconds since this stage began (or was resumed)."""
        return time.monotonic() - self._stage_began

    @property
    def eta(self) -> float | None:
        """Seconds until this stage ends, None when that is not known."""
        if self.total is None or self.step_seconds is None:
            return None
        return max(0, self.total - self.step) * self.step_seconds

    @property
    def counter(self) -> str:
        return f"{self.step}/{self.total}" if self.total is not None else str(self.step)

    def line(self) -> str:
        """The step as one plain line."""
        parts = [f"{self.stage} {self.counter}"]
        for label, name in HEADLINE:
            if name in self.metrics:
                value = number(self.metrics[name])
                parts.append(f"{value} {label}" if label == "tok/s" else f"{label} {value}")
        parts += [f"{name} {duration(s)}" for name, s in self.node_seconds.items()]
        if self.step_seconds is not None:
            parts.append(f"{duration(self.step_seconds)}/step")
        if self.eta is not None:
            parts.append(f"eta {duration(self.eta)}")
        return "  ".join(parts)
