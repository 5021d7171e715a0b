"""Meets a target's boxes of HuggingFace tensors with what the trainer's ranks hold."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from megatron_bridge import regions
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight, weights
from megatron_bridge.regions import Box, Interval
from megatron_bridge.registry import HfConfig, architecture
from megatron_bridge.reshard.copies import View
from megatron_bridge.reshard.targets import Fill
from megatron_bridge.row_shape import Piece, RowShape
from megatron_bridge.sharding import Holding, Placement, holdings


@dataclass(frozen=True, slots=True)
class Held:
    """A piece of a part that one (expert) tensor parallel place of a weight holds."""

    place: int
    part: int
    holding: Holding
    piece: Piece


@dataclass(frozen=True, slots=True)
class Match:
    """Elements of a fill that one place of a weight holds.

    Attributes:
        held: where.
        box: over the part's axes, contiguous in each dimension.
        view: of the place's tensor.
        target: box of the parameter.
    """

    held: Held
    box: Box
    view: View
    target: Box


@dataclass(frozen=True, slots=True)
class _Origin:
    """A part of a weight, under the name of its HuggingFace tensor."""

    weight: int
    part: int
    rows: Interval


class Planner:
    """Finds a fill's elements on the trainer's ranks.

    Attributes:
        weights: of the model.
    """

    def __init__(self, config: HfConfig, layout: ParallelLayout) -> None:
        """``config``: resolved; ``layout``: one that fits it."""
        experts = architecture(config).sizes(config).get("expert", 0)
        self.weights = weights(config)
        self._experts_per_rank = experts // layout.ep
        self._layout = layout
        self._where = Placement(layout, config["num_hidden_layers"], experts)
        self._origins = _by_name(self.weights)
        # All layers, and experts of a rank, share what follows.
        self._held: dict[tuple[int, int | None], list[Held]] = {}
        self._matches: dict[object, tuple[Match, ...]] = {}
        self._holders: dict[tuple[int, int | None, int | None], tuple[int, ...]] = {}

    def matches(self, fill: Fill) -> Iterator[tuple[int, Match]]:
        """Each element of the fill once, with the index of its weight."""
        first = fill.source_box[0]
        for origin in self._origins[fill.source]:
            if origin.rows[0] < first[1] and first[0] < origin.rows[1]:
                weight = self.weights[origin.weight]
                key = (
                    id(weight.shape_of),
                    weight.slice_of,
                    origin.part,
                    fill.source_box,
                    fill.target_box,
                )
                if key not in self._matches:
                    self._matches[key] = tuple(self._find(weight, origin.part, fill))
                for match in self._matches[key]:
                    yield origin.weight, match

    def held(self, weight: Weight) -> list[Held]:
        """Everything that the trainer holds of a weight, place by place."""
        key = (id(weight.shape_of), weight.slice_of)
        if key not in self._held:
            self._held[key] = list(self._hold(weight))
        return self._held[key]

    def _hold(self, weight: Weight) -> Iterator[Held]:
        parts = self._where.tensor_parallel(weight)
        for place in range(1 if weight.row.cut is None else parts):
            for holding in holdings(weight, parts, place):
                for piece in weight.pieces(holding.box):
                    yield Held(place, piece.part, holding, piece)

    def _find(self, weight: Weight, part: int, fill: Fill) -> Iterator[Match]:
        for box in _axis_boxes(weight.shape_of, part, fill.source_box):
            for held in self.held(weight):
                if held.part == part:
                    common = regions.intersect(box, held.piece.huggingface)
                    if common is not None:
                        yield from match_all(weight.shape_of, held, common, fill)

    def holders(self, weight: Weight, place: int) -> tuple[int, ...]:
        """Ranks whose tensors of a weight are alike: replicas of ``place``, ascending."""
        stage, _ = self._where.stage(weight)
        ep = None
        if weight.row.per_expert:
            assert weight.expert is not None
            ep = weight.expert // self._experts_per_rank
        key = (stage, ep, None if weight.row.cut is None else place)
        if key not in self._holders:
            self._holders[key] = tuple(sorted(self._replicas(*key)))
        return self._holders[key]

    def _replicas(self, stage: int, ep: int | None, place: int | None) -> Iterator[int]:
        layout = self._layout
        if ep is None:
            for dp in range(layout.dp):
                for tp in range(layout.tp) if place is None else (place,):
                    yield layout.rank(tp=tp, dp=dp, pp=stage)
            return
        for edp in range(layout.expert_dp):
            for etp in range(layout.expert_tp) if place is None else (place,):
                yield layout.expert_rank(etp=etp, ep=ep, edp=edp, pp=stage)


def _by_name(model: list[Weight]) -> dict[str, list[_Origin]]:
    found: dict[str, list[_Origin]] = {}
    for index, weight in enumerate(model):
        for place, part in enumerate(weight.shape_of.parts):
            rows = part.rows
            if weight.expert is not None and part.axes.dimensions[0] == ("expert",):
                rows = (weight.expert, weight.expert + 1)
            origin = _Origin(index, place, rows)
            found.setdefault(weight.name_of(part.name), []).append(origin)
    return found


def _axis_boxes(shape: RowShape, part: int, box: Box) -> Iterator[Box]:
    """A box over a tensor's dimensions as boxes over the axes of a part of its rows."""
    view = shape.parts[part]
    rows = regions.overlap(box[0], view.rows)
    assert rows is not None
    first = (rows[0] - view.rows[0], rows[1] - view.rows[0])
    ranges = (regions.of_range(*both) for both in zip(view.sizes, (first, *box[1:]), strict=True))
    yield from _joined(ranges)


def _joined(dimensions: Iterable[Iterable[Box]]) -> Iterator[Box]:
    """One box of each dimension, behind one another."""
    for chosen in product(*dimensions):
        yield tuple(interval for box in chosen for interval in box)


def match_all(shape: RowShape, held: Held, box: Box, fill: Fill) -> Iterator[Match]:
    """``box`` of a part's axes as matches that are each a box of the parameter."""
    sizes, dimensions, rest = shape.parts[held.part].sizes, [], box
    for dimension in sizes:
        dimensions.append(_runs(dimension, rest[: len(dimension)]))
        rest = rest[len(dimension) :]
    for plain in _joined(dimensions):
        yield Match(held, plain, _view(shape, held, plain), _target(shape, held, plain, fill))


def _runs(sizes: tuple[int, ...], box: Box) -> Iterator[Box]:
    """A box of one dimension's axes as boxes that are each a range of its flat positions."""
    if regions.flat(sizes, box) is not None:
        yield box
        return
    for index in range(*box[0]):
        for inner in _runs(sizes[1:], box[1:]):
            yield ((index, index + 1), *inner)


def _view(shape: RowShape, held: Held, box: Box) -> View:
    """The elements in the place's tensor, in the order of the part's axes."""
    order = held.piece.order
    absent = [axis for axis, source in enumerate(order) if source is None]
    kept = sorted((source, axis) for axis, source in enumerate(order) if source is not None)
    return View(
        held.holding.rows,
        regions.lengths(held.holding.box),
        regions.relative(shape.to_megatron(held.part, box), held.holding.box),
        (*absent, *(axis for _, axis in kept)),
    )


def _target(shape: RowShape, held: Held, box: Box, fill: Fill) -> Box:
    """The elements in the parameter. Dimensions that only one side has are of length 1."""
    part, found = shape.parts[held.part], []
    for dimension, (begin, _) in zip(part.sizes, fill.source_box, strict=True):
        flat = regions.flat(dimension, box[: len(dimension)])
        assert flat is not None
        first = part.rows[0] if not found else 0
        found.append((flat[0] + first - begin, flat[1] + first - begin))
        box = box[len(dimension) :]
    found = found[-len(fill.target_box) :]
    lead = fill.target_box[: len(fill.target_box) - len(found)]
    rest = fill.target_box[len(lead) :]
    return (
        *lead,
        *((a + begin, b + begin) for (a, b), (begin, _) in zip(found, rest, strict=True)),
    )
