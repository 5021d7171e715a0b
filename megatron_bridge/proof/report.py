"""The outcome of a proof, as JSON and as text. Imports no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_bridge.convert.sizes import show_bytes
from megatron_bridge.proof.problems import Problem

_SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class Stage:
    """A pipeline stage.

    Attributes:
        pp: its rank in the pipeline.
        layers: how many it holds.
        ranks: how many are in it.
        least, most: parameter bytes of its ranks.
    """

    pp: int
    layers: int
    ranks: int
    least: int
    most: int


@dataclass(frozen=True)
class Report:
    """What was proven of a model and a layout, or why not.

    Attributes:
        architecture, layout, dtype: what was asked about.
        problems: the faults, at most as many as asked for.
        problem_count: all faults.
        tensors, elements, bytes: of the HuggingFace checkpoint.
        rank_bytes: parameters (and buffers with weights) of each rank, padding and replicas
            included.
        stages: the same by pipeline stage.
        seconds: that the proof took.
    """

    architecture: str
    layout: str
    dtype: str
    problems: tuple[Problem, ...]
    problem_count: int
    tensors: int
    elements: int
    bytes: int
    rank_bytes: tuple[int, ...]
    stages: tuple[Stage, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the proof holds."""
        return self.problem_count == 0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.rank_bytes)

    @property
    def least(self) -> int:
        """Parameter bytes of the rank with the fewest."""
        return min(self.rank_bytes)

    @property
    def most(self) -> int:
        """Parameter bytes of the rank with the most."""
        return max(self.rank_bytes)

    @property
    def mean(self) -> float:
        """Parameter bytes of a rank on average."""
        return sum(self.rank_bytes) / len(self.rank_bytes)

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``rank_bytes`` has one number per rank."""
        derived = {"ok": self.ok, "ranks": self.ranks}
        spread = {"least": self.least, "most": self.most, "mean": self.mean}
        return derived | spread | asdict(self)

    def table(self) -> str:
        """For people: the verdict, the faults, and bytes by pipeline stage."""
        lines = [
            f"{self.architecture} on {self.layout}: {self.ranks:,} ranks",
            f"{self.tensors:,} HuggingFace tensors, {self.elements:,} elements, "
            f"{show_bytes(self.bytes)} as {self.dtype}",
            self._verdict(),
            *(f"- {problem}" for problem in self.problems[:_SHOWN_PROBLEMS]),
        ]
        hidden = self.problem_count - min(len(self.problems), _SHOWN_PROBLEMS)
        if hidden:
            lines.append(f"- and {hidden:,} more")
        return "\n".join([*lines, "", *self._bytes()])

    def _verdict(self) -> str:
        if self.ok:
            return (
                "proven: each element has one home, and export returns it to its place "
                f"({self.seconds:.1f} s)"
            )
        return f"NOT proven: {self.problem_count:,} fault{'s' * (self.problem_count != 1)}"

    def _bytes(self) -> list[str]:
        rows = [("stage", "layers", "ranks", "least bytes", "most bytes", "")]
        rows += [
            (
                str(stage.pp),
                str(stage.layers),
                f"{stage.ranks:,}",
                f"{stage.least:,}",
                f"{stage.most:,}",
                f"({show_bytes(stage.most)})",
            )
            for stage in self.stages
        ]
        rows.append(
            (
                "all",
                str(sum(stage.layers for stage in self.stages)),
                f"{self.ranks:,}",
                f"{self.least:,}",
                f"{self.most:,}",
                f"(mean {show_bytes(self.mean)})",
            )
        )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]


def stages(
    rank_bytes: Sequence[int], layers: Sequence[int], stage_of: Sequence[int]
) -> tuple[Stage, ...]:
    """Bytes by pipeline stage.

    Args:
        rank_bytes: of each rank.
        layers: of each stage.
        stage_of: each rank's stage.
    """
    own: list[list[int]] = [[] for _ in layers]
    for count, stage in zip(rank_bytes, stage_of, strict=True):
        own[stage].append(count)
    return tuple(
        Stage(pp, layers[pp], len(counts), min(counts, default=0), max(counts, default=0))
        for pp, counts in enumerate(own)
    )
