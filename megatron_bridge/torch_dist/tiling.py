"""Rectangles that cover each element of a tensor exactly once: the proof, and finding them."""

from bisect import bisect_right
from collections.abc import Sequence

from megatron_bridge.source import Ranges

# An inner node: the edges that cut one dimension into slabs, and what lies in each slab. A leaf is
# the number of the one rectangle that is there.
_Node = int | tuple[list[int], list["_Node"]]


class Tiling:
    """The rectangles of one tensor, found by position.

    Built by cutting the tensor into slabs at every edge of the first dimension, each slab at every
    edge of the second, and so on. What remains must lie in one rectangle: that proves the cover.

    Raises:
        ValueError: naming the first element that no rectangle covers, or that two cover.
    """

    def __init__(self, shape: Sequence[int], rectangles: Sequence[Ranges]) -> None:
        self._shape = tuple(shape)
        self._rectangles = rectangles
        for rectangle in rectangles:
            check_inside(rectangle, self._shape, "of a chunk")
        # An empty rectangle covers nothing, and an empty tensor needs no cover.
        solid = [i for i, rectangle in enumerate(rectangles) if _solid(rectangle)]
        self._root = self._cut(solid, 0, ()) if 0 not in self._shape else None

    def _cut(self, numbers: list[int], dimension: int, point: tuple[int, ...]) -> _Node:
        if dimension == len(self._shape):
            if len(numbers) == 1:
                return numbers[0]
            raise ValueError(f"{_told(numbers)} element {list(point)}")
        size = self._shape[dimension]
        starting: dict[int, list[int]] = {}
        ends = {0, size}
        for number in numbers:
            start, stop = self._rectangles[number][dimension]
            starting.setdefault(start, []).append(number)
            ends |= {start, stop}
        edges = sorted(ends)
        here: list[int] = []
        slabs = []
        for edge in edges[:-1]:
            here = [n for n in here if self._rectangles[n][dimension][1] > edge]
            here += starting.get(edge, [])
            if not here:
                rest = (0,) * (len(self._shape) - dimension - 1)
                raise ValueError(f"{_told(here)} element {[*point, edge, *rest]}")
            slabs.append(self._cut(here, dimension + 1, (*point, edge)))
        return edges, slabs

    def overlapping(self, ranges: Ranges) -> list[int]:
        """Numbers of the rectangles that share an element with ``ranges``, in order."""
        found: set[int] = set()
        if self._root is not None and _solid(ranges):
            _collect(self._root, ranges, 0, found)
        return sorted(found)


def _collect(node: _Node, ranges: Ranges, dimension: int, found: set[int]) -> None:
    if isinstance(node, int):
        found.add(node)
        return
    edges, slabs = node
    start, stop = ranges[dimension]
    slab = bisect_right(edges, start) - 1
    while slab < len(slabs) and edges[slab] < stop:
        _collect(slabs[slab], ranges, dimension + 1, found)
        slab += 1


def _told(numbers: list[int]) -> str:
    return f"{len(numbers)} chunks cover" if numbers else "no chunk covers"


def _solid(ranges: Ranges) -> bool:
    return all(start < stop for start, stop in ranges)


def check_inside(ranges: Ranges, shape: tuple[int, ...], whose: str) -> None:
    """Raise a ValueError unless the rectangle is one of the shape's elements."""
    fits = len(ranges) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(ranges, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"the rectangle {show(ranges)} {whose} is not inside {list(shape)}")


def show(ranges: Ranges) -> str:
    """A rectangle as Python writes it: ``[0:4, 8:16]``."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in ranges) + "]"


def overlap(one: Ranges, other: Ranges) -> Ranges:
    """The rectangle that two rectangles share; one interval is empty where they do not."""
    shared = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start = max(a, c)
        shared.append((start, max(start, min(b, d))))
    return tuple(shared)


def within(part: Ranges, whole: Ranges) -> tuple[slice, ...]:
    """Where ``part`` lies in a tensor that holds exactly ``whole``."""
    return tuple(
        slice(start - base, stop - base)
        for (start, stop), (base, _) in zip(part, whole, strict=True)
    )
