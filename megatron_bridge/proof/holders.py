"""Which ranks hold a weight, by asking `Placement.place` of every rank. Imports no torch.

A large model on a large cluster has some 10^8 pairs of weight and rank. Two things make asking
quick without trusting how `place` is written:

- `place` is asked with a probe that notices whether it looks at the expert's number. Where it did
  not (on the ranks of other pipeline stages) the answer is that of all experts.
- Of ranks that share all their coordinates but the data parallel ones, the first is asked about
  every expert; the others are asked about each expert that the first holds.
"""

from typing import Any

from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight
from megatron_bridge.registry import Row
from megatron_bridge.sharding import Placement

# Model chunk and tensor parallel place.
Place = tuple[int, int]


class _Probe(Weight):
    """A weight that notices whether its expert's number was read."""

    @classmethod
    def of(cls, weight: Weight) -> "_Probe":
        found = cls(weight.row, weight.layer, weight.expert, weight.shape_of)
        found.__dict__["asked"] = False
        return found

    def __getattribute__(self, name: str) -> Any:
        if name == "expert":
            self.__dict__["asked"] = True
        return super().__getattribute__(name)


class Holders:
    """Answers who holds a weight of a model."""

    def __init__(self, layout: ParallelLayout, layers: int, experts: int) -> None:
        self.placement = Placement(layout, layers, experts)
        self._ranks = range(layout.world)
        self._groups = [
            (layout.coordinates(rank).tp, *layout.expert_coordinates(rank)[:2])
            for rank in self._ranks
        ]
        self._known: dict[tuple[int, int | None], tuple[dict[int, Place], list[list[int]]]] = {}
        # The rows' ids are keys: keep them alive.
        self._rows: dict[int, Row] = {}

    def of(self, weight: Weight) -> dict[int, Place]:
        """Every rank that holds the weight, with its model chunk and tensor parallel place."""
        self._rows[id(weight.row)] = weight.row
        if weight.expert is None:
            return self._ask(weight, self._ranks)
        fixed, groups = self._expert_ranks(weight)
        found = dict(fixed)
        for first, *others in groups:
            place = self.placement.place(weight, first)
            if place is not None:
                found[first] = place
                found |= self._ask(weight, others)
        return found

    def _ask(self, weight: Weight, ranks: Any) -> dict[int, Place]:
        place = self.placement.place
        return {rank: at for rank in ranks if (at := place(weight, rank)) is not None}

    def _expert_ranks(self, weight: Weight) -> tuple[dict[int, Place], list[list[int]]]:
        """Ranks that hold the weight whatever its expert; and those where the expert matters."""
        key = (id(weight.row), weight.layer)
        if key not in self._known:
            fixed: dict[int, Place] = {}
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank in self._ranks:
                probe = _Probe.of(weight)
                place = self.placement.place(probe, rank)
                if probe.__dict__["asked"]:
                    stage = self.placement.layout.coordinates(rank).pp
                    groups.setdefault((stage, *self._groups[rank]), []).append(rank)
                elif place is not None:
                    fixed[rank] = place
            self._known[key] = fixed, list(groups.values())
        return self._known[key]
