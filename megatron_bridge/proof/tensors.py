"""The HuggingFace side: each element of each tensor has one home. Imports no torch."""

from collections.abc import Iterator, Mapping

from megatron_bridge import regions
from megatron_bridge.mappings import PartView
from megatron_bridge.proof import boxes
from megatron_bridge.proof.boxes import Sizes
from megatron_bridge.proof.problems import Problems, show
from megatron_bridge.regions import Box, Interval
from megatron_bridge.registry import Architecture, Axes, HfConfig, Row

Shape = tuple[int, ...]
# Rows of a tensor, seen by the sizes of axes.
View = tuple[Interval, Sizes]


def expected(config: HfConfig, table: Architecture) -> dict[str, Shape]:
    """Every HuggingFace tensor that a table lists, with its shape, read off its rows.

    Args:
        config: resolved.
    """
    sizes = table.sizes(config)
    found: dict[str, Shape] = {}
    for row in table.rows_of(config):
        shapes = _shapes(row, sizes)
        for layer in _layers(row, config, table):
            for expert in range(sizes["expert"]) if row.per_expert else (None,):
                for pattern, shape in shapes.items():
                    found[pattern.format(layer=layer, expert=expert)] = shape
    return found


def _layers(row: Row, config: HfConfig, table: Architecture) -> Iterator[int | None]:
    if not row.per_layer:
        yield None
        return
    for layer in range(config["num_hidden_layers"]):
        kind = "moe" if table.is_moe(config, layer) else "dense"
        if row.layers in (None, kind) and (kind == "moe" or not row.per_expert):
            yield layer


def _shapes(row: Row, sizes: dict[str, int]) -> dict[str, Shape]:
    """The shape of each of a row's tensors; parts of one name lie behind one another."""
    found: dict[str, Shape] = {}
    for part in row.parts:
        shape = []
        for dimension in Axes.parse(part.axes).dimensions:
            length = 1
            for axis in dimension:
                length *= sizes[axis]
            shape.append(length)
        before = found.get(part.name, (0,))[0]
        found[part.name] = (before + shape[0], *shape[1:])
    return found


class Tensors:
    """Collects the boxes of HuggingFace tensors that homes hold, and checks them at the end."""

    def __init__(self) -> None:
        self._held: dict[str, list[tuple[View, Box, frozenset[int]]]] = {}
        # Layers and experts have the same boxes: each is kept once.
        self._views: dict[View, View] = {}
        self._boxes: dict[Box, Box] = {}

    def add(self, part: PartView, box: Box, ranks: frozenset[int]) -> None:
        """A home of these ranks holds a box of a part."""
        view = (part.rows, part.sizes)
        view = self._views.setdefault(view, view)
        box = self._boxes.setdefault(box, box)
        self._held.setdefault(part.name, []).append((view, box, ranks))

    def check(self, shapes: Mapping[str, Shape], problems: Problems) -> None:
        """Every element of every tensor of ``shapes`` is there once, and nothing else is."""
        for name, shape in shapes.items():
            held = self._held.pop(name, [])
            if not held:
                problems.add(name, (0,) * len(shape), (), "has no home: no rank holds this tensor")
            elif _fits(name, shape, held, problems):
                _check_tensor(name, shape, held, problems)
        for name, held in self._held.items():
            (rows, sizes), box, ranks = held[0]
            place = boxes.element(sizes, boxes.start(box), rows[0])
            what = f"is on {show(ranks)}, but the model has no such tensor"
            problems.add(name, place, ranks, what)
        self._held.clear()


def _fits(
    name: str, shape: Shape, held: list[tuple[View, Box, frozenset[int]]], problems: Problems
) -> bool:
    """Whether the axes that homes see the tensor by make up its shape."""
    for (rows, sizes), _, ranks in held:
        lengths = [regions.volume(regions.full(dimension)) for dimension in sizes]
        if rows[1] - rows[0] != lengths[0] or tuple(lengths[1:]) != shape[1:] or rows[1] > shape[0]:
            what = f"is of shape {shape}, but its rows {rows} are taken as the axes {sizes}"
            problems.add(name, (rows[0], *(0,) * (len(shape) - 1)), ranks, what)
            return False
    return True


def _check_tensor(
    name: str, shape: Shape, held: list[tuple[View, Box, frozenset[int]]], problems: Problems
) -> None:
    views: dict[View, list[tuple[Box, frozenset[int]]]] = {}
    for view, box, ranks in held:
        views.setdefault(view, []).append((box, ranks))
    ordered = sorted(views, key=lambda view: view[0])
    at = 0
    for rows, _ in ordered:
        if rows[0] != at:  # rows that two views share, or that none has: compare all as rectangles
            _check_rectangles(name, shape, held, problems)
            return
        at = rows[1]
    if at != shape[0]:
        what = f"has no home: rows {at} to {shape[0]} are part of no Megatron tensor"
        problems.add(name, (at, *(0,) * (len(shape) - 1)), (), what)
    for view in ordered:
        _check_boxes(name, view, views[view], problems)


def _check_rectangles(
    name: str, shape: Shape, held: list[tuple[View, Box, frozenset[int]]], problems: Problems
) -> None:
    found = [
        (rectangle, ranks)
        for (rows, sizes), box, ranks in held
        for rectangle in boxes.rectangles(sizes, box, rows[0])
    ]
    view = ((0, shape[0]), tuple((length,) for length in shape))
    _check_boxes(name, view, found, problems)


def _check_boxes(
    name: str, view: View, held: list[tuple[Box, frozenset[int]]], problems: Problems
) -> None:
    """The boxes fill the view's axes, each element once."""
    rows, sizes = view
    whole = regions.full(size for dimension in sizes for size in dimension)
    found = [box for box, _ in held]
    twice = boxes.clash(found)
    if twice is not None:
        one, other, position = twice
        both = [show(held[one][1]), show(held[other][1])]
        what = (
            f"has two homes: {both[0]} and {both[1]}"
            if both[0] != both[1]
            else (f"is twice on {both[0]}")
        )
        place = boxes.element(sizes, position, rows[0])
        problems.add(name, place, held[one][1] | held[other][1], what)
    lost = boxes.hole(whole, found, disjoint=twice is None)
    if lost is not None:
        what = "has no home: no rank holds this element"
        problems.add(name, boxes.element(sizes, lost, rows[0]), (), what)
