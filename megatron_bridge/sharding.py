"""Which part of a Megatron tensor a rank holds. Pure: ranks and sizes in, no process group.

A rank's tensor is a list of holdings: rows of its own tensor that are a box of the whole one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_bridge import regions
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight
from megatron_bridge.regions import Box, Interval
from megatron_bridge.row_shape import RowShape


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
    return list(_holdings(weight.shape_of, tp, rank))


# Once for all layers and experts.
@lru_cache(maxsize=1024)
def _holdings(shape: RowShape, tp: int, rank: int) -> tuple[Holding, ...]:
    sizes, cut = shape.sizes(tp), shape.row.cut
    whole = regions.full(size for dimension in sizes for size in dimension)
    if cut is None:
        return (Holding((0, shape.shape(tp)[0]), whole),)
    place = shape.axes.names.index(cut)
    size = whole[place][1]
    if size % tp == 0:
        interval = (size // tp * rank, size // tp * (rank + 1))
        box = (*whole[:place], interval, *whole[place + 1 :])
        return (Holding((0, _rows(sizes, box)), box),)
    return tuple(_within(shape, tp, rank, sizes, whole))


def _rows(sizes: tuple[tuple[int, ...], ...], box: Box) -> int:
    """Rows of a tensor that is this box."""
    return regions.volume(box[: len(sizes[0])])


def _within(
    shape: RowShape, tp: int, rank: int, sizes: tuple[tuple[int, ...], ...], whole: Box
) -> Iterator[Holding]:
    """Equal runs of the first dimension's rows, however they cut its axes."""
    assert shape.row.cut == shape.axes.names[0], f"{shape.row.megatron} cannot be cut so"
    rows = shape.shape(tp)[0]
    assert rows % tp == 0, (shape.row.megatron, rows, tp)
    start, stop = rows // tp * rank, rows // tp * (rank + 1)
    at = 0
    for box in regions.of_range(sizes[0], (start, stop)):
        count = regions.volume(box)
        yield Holding((at, at + count), (*box, *whole[len(sizes[0]) :]))
        at += count


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
        self._stages: dict[int, tuple[int, int]] = {}

    def tensor_parallel(self, weight: Weight) -> int:
        """Into how many parts a weight is cut."""
        return self.layout.expert_tp if weight.row.per_expert else self.layout.tp

    def stage(self, weight: Weight) -> tuple[int, int]:
        """Pipeline rank and model chunk that hold a weight."""
        layer = weight.layer
        if layer is None:
            first = weight.row.megatron.startswith("embedding.")
            return (0, 0) if first else (self.layout.pp - 1, self.layout.vpp - 1)
        if layer not in self._stages:
            self._stages[layer] = self.layout.stage_of(self.layers, layer)
        return self._stages[layer]

    def owners(self, weight: Weight) -> list[Owner]:
        """One rank per part: the first of its replicas."""
        layout = self.layout
        stage, _ = self.stage(weight)
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
        stage, chunk = self.stage(weight)
        here = layout.coordinates(rank)
        if stage != here.pp:
            return None
        if not weight.row.per_expert:
            return chunk, here.tp
        place = layout.expert_coordinates(rank)
        assert weight.expert is not None
        if weight.expert // (self.experts // layout.ep) == place.ep:
            return chunk, place.etp
        return None
