"""Curves out of step rows: extraction per stage, down-sampling, smoothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.monitor.jsonl import Row

MAX_POINTS = 500


@dataclass(frozen=True)
class Point:
    """One drawn point: the mean of the steps it stands for, and their extremes."""

    step: float
    value: float  # NaN where no step of the bucket has a finite value: a gap in the line
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """A metric over the steps of one stage."""

    name: str
    steps: list[int]
    values: list[float]

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]

    @property
    def lost(self) -> int:
        """How many values are NaN or infinite."""
        return len(self.values) - len(self.finite)

    def points(self, limit: int = MAX_POINTS) -> list[Point]:
        """At most ``limit`` points: equal buckets of steps, each with mean, low and high."""
        count = min(limit, len(self.steps))
        edges = [round(index * len(self.steps) / count) for index in range(count + 1)]
        buckets = zip(edges, edges[1:], strict=False)
        return [_point(self.steps[a:b], self.values[a:b]) for a, b in buckets]


def _point(steps: Sequence[int], values: Sequence[float]) -> Point:
    step = sum(steps) / len(steps)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Point(step, math.nan, math.nan, math.nan)
    return Point(step, sum(finite) / len(finite), min(finite), max(finite))


def by_stage(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each stage, stages in the order in which they began."""
    stages: dict[str, list[Row]] = {}
    for row in rows:
        stages.setdefault(str(row["stage"]), []).append(row)
    return stages


def series_of(rows: Sequence[Row], name: str) -> Series:
    """The metric ``name`` over the rows that have it (an evaluation is not made each step)."""
    found = [row for row in rows if name in row["metrics"]]
    values = [float(row["metrics"][name]) for row in found]
    return Series(name, [int(row["step"]) for row in found], values)


def metric_names(rows: Sequence[Row]) -> list[str]:
    """Every metric that occurs in the rows, sorted."""
    return sorted({name for row in rows for name in row["metrics"]})


def node_names(rows: Sequence[Row]) -> list[str]:
    """Every node that was timed, the costliest first."""
    totals: dict[str, float] = {}
    for row in rows:
        for name, seconds in row["node_seconds"].items():
            totals[name] = totals.get(name, 0.0) + seconds
    return sorted(totals, key=lambda name: -totals[name])


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred running mean over at most ``window`` values; NaN stays NaN and is left out.

    The window narrows towards both ends, so a trend is not bent there.
    """
    result = []
    for index, value in enumerate(values):
        half = min(window // 2, index, len(values) - 1 - index)
        near = [v for v in values[index - half : index + half + 1] if v == v]
        result.append(sum(near) / len(near) if value == value else math.nan)
    return result
