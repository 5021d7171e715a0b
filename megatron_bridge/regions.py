"""Interval arithmetic on the coordinates of tensors. Imports no torch.

A box is one half-open interval per axis. A dimension of a tensor is the product of one or more
axes, the slowest first; ``sizes`` are those of its axes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[int, int]
Box = tuple[Interval, ...]


def full(sizes: Iterable[int]) -> Box:
    """The box that is everything."""
    return tuple((0, size) for size in sizes)


def lengths(box: Box) -> tuple[int, ...]:
    """The box's size along each axis."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod(stop - start for start, stop in box)


def overlap(one: Interval, other: Interval) -> Interval | None:
    """The common part of two intervals; None when there is none."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else None


def intersect(one: Box, other: Box) -> Box | None:
    """The common part of two boxes; None when there is none."""
    found = []
    for a, b in zip(one, other, strict=True):
        both = overlap(a, b)
        if both is None:
            return None
        found.append(both)
    return tuple(found)


def relative(box: Box, origin: Box) -> Box:
    """``box`` in the coordinates of ``origin``, which holds it."""
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(box, origin, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """The index that cuts the box out."""
    return tuple(slice(start, stop) for start, stop in box)


def of_range(sizes: Sequence[int], interval: Interval) -> Iterator[Box]:
    """The boxes, in order, that a range of a dimension's flat positions falls into.

    Each is contiguous in the dimension. Few: at most two per axis and one in the middle.
    """
    start, stop = interval
    if start >= stop:
        return
    if len(sizes) == 1:
        yield ((start, stop),)
        return
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one slice of the slowest axis
        yield from _inside(sizes, start // inner, (start % inner, stop % inner))
        return
    if start % inner:
        yield from _inside(sizes, first - 1, (start % inner, inner))
    if first < last:
        yield ((first, last), *full(sizes[1:]))
    if stop % inner:
        yield from _inside(sizes, last, (0, stop % inner))


def _inside(sizes: Sequence[int], index: int, interval: Interval) -> Iterator[Box]:
    for box in of_range(sizes[1:], interval):
        yield ((index, index + 1), *box)


def flat(sizes: Sequence[int], box: Box) -> Interval | None:
    """The flat positions of a box within its dimension; None when it is not contiguous."""
    start, stop = cover(sizes, box)
    first = sum(a * math.prod(sizes[axis + 1 :]) for axis, (a, _) in enumerate(box))
    last = sum((b - 1) * math.prod(sizes[axis + 1 :]) for axis, (_, b) in enumerate(box)) + 1
    assert start <= first < last <= stop
    return (first, last) if last - first == volume(box) else None


def cover(sizes: Sequence[int], box: Box) -> Interval:
    """The flat positions between the box's bounds on the slowest axis."""
    inner = math.prod(sizes[1:])
    return box[0][0] * inner, box[0][1] * inner


def uncovered(whole: Box, parts: list[Box]) -> tuple[int, ...] | None:
    """A position of ``whole`` that no part holds; None when the parts fill it."""
    left = [whole]
    for part in parts:
        left = [piece for box in left for piece in subtract(box, part)]
    return tuple(start for start, _ in left[0]) if left else None


def subtract(box: Box, part: Box) -> list[Box]:
    """What is left of ``box`` without ``part``, as disjoint boxes."""
    common = intersect(box, part)
    if common is None:
        return [box]
    left, core = [], list(box)
    for axis, (start, stop) in enumerate(common):
        low, high = core[axis]
        for side in ((low, start), (stop, high)):
            if side[0] < side[1]:
                left.append((*core[:axis], side, *core[axis + 1 :]))
        core[axis] = (start, stop)
    return left


def clash(boxes: list[Box]) -> tuple[int, ...] | None:
    """A position that two of the boxes hold; None when they are disjoint."""
    for place, box in enumerate(boxes):
        for other in boxes[:place]:
            common = intersect(box, other)
            if common is not None:
                return tuple(start for start, _ in common)
    return None
