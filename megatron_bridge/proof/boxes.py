"""Many boxes at once: are they disjoint, do they fill a whole? Imports no torch."""

import math
from collections.abc import Iterator, Sequence

from megatron_bridge import regions
from megatron_bridge.regions import Box

Position = tuple[int, ...]
Sizes = tuple[tuple[int, ...], ...]


def start(box: Box) -> Position:
    """The box's first position."""
    return tuple(first for first, _ in box)


def at(position: Position) -> Box:
    """The box of one element."""
    return tuple((index, index + 1) for index in position)


def contains(whole: Box, box: Box) -> bool:
    """Whether ``box`` is not empty and lies in ``whole``."""
    return len(whole) == len(box) and all(
        low <= first < last <= high for (low, high), (first, last) in zip(whole, box, strict=True)
    )


def clash(boxes: Sequence[Box]) -> tuple[int, int, Position] | None:
    """Two of the boxes (by index) and a position that both hold; None when all are disjoint.

    Sweeps along the axis on which the boxes begin at the most places, so that the cuts of a tensor
    cost about as much as sorting them.
    """
    if len(boxes) < 2 or not boxes[0]:
        return (0, 1, ()) if len(boxes) > 1 else None
    axes = range(len(boxes[0]))
    axis = max(axes, key=lambda a: len({box[a][0] for box in boxes}))
    open_boxes: list[int] = []
    for one in sorted(range(len(boxes)), key=lambda index: boxes[index][axis][0]):
        first = boxes[one][axis][0]
        open_boxes = [other for other in open_boxes if boxes[other][axis][1] > first]
        for other in open_boxes:
            common = regions.intersect(boxes[one], boxes[other])
            if common is not None:
                return min(one, other), max(one, other), start(common)
        open_boxes.append(one)
    return None


def hole(whole: Box, boxes: Sequence[Box], *, disjoint: bool) -> Position | None:
    """A position of ``whole`` that none of the boxes, which lie in it, holds; None: they fill it.

    Args:
        disjoint: the boxes are known to be; then their volumes decide.
    """
    if disjoint and sum(map(regions.volume, boxes)) == regions.volume(whole):
        return None
    return regions.uncovered(whole, list(boxes))


def element(sizes: Sizes, position: Position, first_row: int = 0) -> Position:
    """The tensor's own coordinates of a position that has one index per axis.

    Args:
        sizes: of each dimension's axes.
        first_row: where the axes begin on the first dimension.
    """
    found, rest = [], position
    for dimension in sizes:
        flat = 0
        for size, index in zip(dimension, rest[: len(dimension)], strict=True):
            flat = flat * size + index
        found.append(flat)
        rest = rest[len(dimension) :]
    found[0] += first_row
    return tuple(found)


def rectangles(sizes: Sizes, box: Box, first_row: int = 0) -> Iterator[Box]:
    """A box of axes as rectangles of the tensor's own dimensions."""
    if not sizes:
        yield ()
        return
    depth = len(sizes[0])
    for first, last in _runs(sizes[0], box[:depth]):
        for rest in rectangles(sizes[1:], box[depth:]):
            yield ((first + first_row, last + first_row), *rest)


def _runs(sizes: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """The flat intervals of a dimension that a box of its axes is."""
    interval = regions.flat(sizes, box)
    if interval is not None:
        yield interval
        return
    inner = math.prod(sizes[1:])
    for index in range(*box[0]):
        for first, last in _runs(sizes[1:], box[1:]):
            yield index * inner + first, index * inner + last
