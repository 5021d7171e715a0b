"""Which part of a Megatron tensor a rank holds. Pure: ranks and sizes in, no process group.

A rank's tensor is a list of holdings: rows of its own tensor that are a box of the whole one.
"""

from dataclasses import dataclass

from megatron_bridge import regions
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight
from megatron_bridge.regions import Box, Interval


@dataclass(frozen=True)
class Holding:
    """Rows of a rank's tensor and the box of the whole Megatron tensor that they are.

    ``tensor[rows[0]:rows[1]].view(lengths of box)`` has the box's elements in order.
    """

    rows: Interval
    box: Box


def holdings(weight: Weight, tp: int, rank: int) -> list[Holding]:
    """What tensor-parallel rank ``rank`` of ``tp`` holds of a weight.

    Where several ranks share a key-value head the box of a rank is cut within the head.
    """
    sizes = weight.sizes(tp)
    whole = regions.full(size for dimension in sizes for size in dimension)
    if weight.row.cut is None:
        return [Holding((0, weight.shape(tp)[0]), whole)]
    place = weight.axes.names.index(weight.row.cut)
    size = whole[place][1]
    if size % tp == 0:
        interval = (size // tp * rank, size // tp * (rank + 1))
        box = (*whole[:place], interval, *whole[place + 1 :])
        return [Holding((0, _rows(sizes, box)), box)]
    return _within(weight, tp, rank, sizes, whole)


def _rows(sizes: tuple[tuple[int, ...], ...], box: Box) -> int:
    """Rows of a tensor that is this box."""
    return regions.volume(box[: len(sizes[0])])


def _within(
    weight: Weight, tp: int, rank: int, sizes: tuple[tuple[int, ...], ...], whole: Box
) -> list[Holding]:
    """Equal runs of the first dimension's rows, however they cut its axes."""
    assert weight.row.cut == weight.axes.names[0], f"{weight.row.megatron} cannot be cut so"
    rows = weight.shape(tp)[0]
    assert rows % tp == 0, (weight.row.megatron, rows, tp)
    start, stop = rows // tp * rank, rows // tp * (rank + 1)
    found, at = [], 0
    for box in regions.of_range(sizes[0], (start, stop)):
        count = regions.volume(box)
        found.append(Holding((at, at + count), (*box, *whole[len(sizes[0]) :])))
        at += count
    return found


def local_shape(weight: Weight, tp: int) -> tuple[int, ...]:
    """The shape of one rank's tensor."""
    shape = list(weight.shape(tp))
    if weight.row.cut is not None:
        for dimension, axes in enumerate(weight.axes.dimensions):
            if weight.row.cut in axes:
                shape[dimension] //= tp
    return tuple(shape)


@dataclass(frozen=True)
class Owner:
    """A rank that holds a weight, and its place among those that cut it.

    Attributes:
        rank: in the whole layout.
        place: its tensor (or expert tensor) parallel rank.
    """

    rank: int
    place: int


class Placement:
    """Which ranks of a layout hold which weights of a model with ``layers`` layers."""

    def __init__(self, layout: ParallelLayout, layers: int, experts: int) -> None:
        self.layout = layout
        self.layers = layers
        self.experts = experts

    def tensor_parallel(self, weight: Weight) -> int:
        """Into how many parts a weight is cut."""
        return self.layout.expert_tp if weight.row.per_expert else self.layout.tp

    def stages(self, weight: Weight) -> list[tuple[int, int]]:
        """Pipeline ranks and model chunks that hold a weight; the first is the owner's."""
        if weight.layer is not None:
            return [self.layout.stage_of(self.layers, weight.layer)]
        if weight.row.megatron.startswith("embedding."):
            return [(0, 0)]
        return [(self.layout.pp - 1, self.layout.vpp - 1)]

    def owners(self, weight: Weight) -> list[Owner]:
        """One rank per part: the first of its replicas."""
        layout = self.layout
        stage, _ = self.stages(weight)[0]
        if weight.expert is not None and weight.row.per_expert:
            ep = weight.expert // (self.experts // layout.ep)
            return [
                Owner(layout.expert_rank(etp=place, ep=ep, pp=stage), place)
                for place in range(self._parts(weight))
            ]
        return [
            Owner(layout.rank(tp=place, pp=stage), place) for place in range(self._parts(weight))
        ]

    def _parts(self, weight: Weight) -> int:
        return 1 if weight.row.cut is None else self.tensor_parallel(weight)

    def local_expert(self, weight: Weight) -> int | None:
        """The weight's expert among those of its rank."""
        if weight.expert is None:
            return None
        return weight.expert % (self.experts // self.layout.ep)

    def place(self, weight: Weight, rank: int) -> tuple[int, int] | None:
        """Model chunk and tensor parallel place of a weight on a rank; None: not held there.

        The copy of a tied embedding on the last stage does not count.
        """
        layout = self.layout
        here = layout.coordinates(rank)
        for stage, chunk in self.stages(weight):
            if stage != here.pp:
                continue
            if not weight.row.per_expert:
                return chunk, here.tp
            place = layout.expert_coordinates(rank)
            assert weight.expert is not None
            if weight.expert // (self.experts // layout.ep) == place.ep:
                return chunk, place.etp
        return None
