"""What all layers and experts of a row have in common, by their axes. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

from megatron_bridge import regions
from megatron_bridge.regions import Box, Interval
from megatron_bridge.registry import PADDED, STACK, Axes, Row


@dataclass(frozen=True)
class PartShape:
    """A part of a row: a HuggingFace tensor, or the rows of one.

    Attributes:
        name: of the tensor, with ``{layer}`` and ``{expert}``.
        rows: the part's rows of the tensor's first dimension.
        axes: its axes.
        sizes: the sizes of each dimension's axes.
        stack: where the part lies on the Megatron tensor's stack axis.
    """

    name: str
    rows: Interval
    axes: Axes
    sizes: tuple[tuple[int, ...], ...]
    stack: Interval


@cache
def flat(sizes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Sizes of all axes. One result serves all layers: a model has tens of thousands of parts."""
    return tuple(size for dimension in sizes for size in dimension)


@cache
def box_of(axes: Axes, sizes: tuple[tuple[int, ...], ...], expert: int | None) -> Box:
    """All of a part that belongs to an expert; all of it where it holds no experts."""
    return tuple(
        (expert, expert + 1) if axis == "expert" and expert is not None else (0, size)
        for axis, size in zip(axes.names, flat(sizes), strict=True)
    )


@dataclass(frozen=True)
class Piece:
    """The same elements in three places: a part, the Megatron tensor, and a box of the latter.

    Attributes:
        part: index of the part.
        huggingface: box of the part.
        megatron: box of the Megatron tensor, of the same elements.
        order: for each Megatron axis the part's axis of the same elements, or None where the part
            has none (its size there is 1).
    """

    part: int
    huggingface: Box
    megatron: Box
    order: tuple[int | None, ...]


class RowShape:
    """A row's Megatron tensor and its parts in a model of these sizes.

    Attributes:
        axes: of the Megatron tensor.
        parts: in the order of the stack axis.
        real: the size of each Megatron axis, without padding.
        tensors: the HuggingFace tensors' names, with ``{layer}`` and ``{expert}``, and shapes.
        holds_experts: whether a HuggingFace tensor holds all experts.
    """

    def __init__(self, row: Row, sizes: dict[str, int]) -> None:
        self.row = row
        self.axes = Axes.parse(row.shape)
        self._size = sizes
        self._fillers: dict[Axes, str | None] = {}
        self._orders: dict[Axes, tuple[int | None, ...]] = {}
        self._padded: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.parts = tuple(self._lay_out())
        stacked = self.parts[-1].stack[1]
        self.real = {
            axis: stacked if axis == STACK else self._size[axis] for axis in self.axes.names
        }
        # The last part of a name ends with the tensor's last row.
        self.tensors = tuple(
            {
                part.name: (part.rows[1], *(prod(dimension) for dimension in part.sizes[1:]))
                for part in self.parts
            }.items()
        )
        self.holds_experts = any("expert" in part.axes.names for part in self.parts)

    def _lay_out(self) -> Iterator[PartShape]:
        stacked, rows = 0, {}
        for part in self.row.parts:
            axes = Axes.parse(part.axes)
            sizes = tuple(tuple(self._size[a] for a in dim) for dim in axes.dimensions)
            filler = self.filler(axes)
            length = 1 if filler is None else self._size[filler]
            first = rows.get(part.name, 0)
            rows[part.name] = first + prod(sizes[0])
            own = (first, rows[part.name])
            yield PartShape(part.name, own, axes, sizes, (stacked, stacked + length))
            stacked += length

    def filler(self, axes: Axes) -> str | None:
        """The part's axis that fills the stack axis; None when it takes one place there."""
        if axes not in self._fillers:
            own = [a for a in axes.names if a not in self.axes.names and a != "expert"]
            assert len(own) <= 1 and (not own or STACK in self.axes.names), (self.row, axes)
            self._fillers[axes] = own[0] if own else None
        return self._fillers[axes]

    def order(self, axes: Axes) -> tuple[int | None, ...]:
        """The part's axis at each Megatron axis."""
        if axes not in self._orders:
            filler = self.filler(axes)
            place = {name: index for index, name in enumerate(axes.names)}
            self._orders[axes] = tuple(
                (place[filler] if filler else None) if axis == STACK else place[axis]
                for axis in self.axes.names
            )
        return self._orders[axes]

    def sizes(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """Sizes of each dimension's axes, the vocabulary padded for ``tp`` ranks."""
        if tp not in self._padded:
            self._padded[tp] = tuple(
                tuple(
                    padded_vocabulary(self.real[axis], tp) if axis == PADDED else self.real[axis]
                    for axis in dimension
                )
                for dimension in self.axes.dimensions
            )
        return self._padded[tp]

    def shape(self, tp: int) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(prod(dimension) for dimension in self.sizes(tp))

    def pieces(self, expert: int | None, box: Box) -> Iterator[Piece]:
        """What a box of an expert's Megatron tensor is made of; padding is made of nothing."""
        for index, part in enumerate(self.parts):
            piece = self._piece(index, part, expert, box)
            if piece is not None:
                yield piece

    def _piece(self, index: int, part: PartShape, expert: int | None, box: Box) -> Piece | None:
        names = self.axes.names
        bounds = {axis: part.stack if axis == STACK else (0, self.real[axis]) for axis in names}
        inside = regions.intersect(box, tuple(bounds[axis] for axis in names))
        if inside is None:
            return None
        held = dict(zip(names, inside, strict=True))
        filler = self.filler(part.axes)
        huggingface = []
        for axis, whole in zip(part.axes.names, box_of(part.axes, part.sizes, expert), strict=True):
            if axis == filler:
                start, stop = held[STACK]
                huggingface.append((start - part.stack[0], stop - part.stack[0]))
            else:
                huggingface.append(held.get(axis, whole))
        return Piece(index, tuple(huggingface), inside, self.order(part.axes))

    def to_megatron(self, index: int, box: Box) -> Box:
        """Where a box of a part lies in the Megatron tensor: the inverse of ``pieces``."""
        part = self.parts[index]
        held = dict(zip(part.axes.names, box, strict=True))
        filler = self.filler(part.axes)
        found = []
        for axis in self.axes.names:
            if axis != STACK:
                found.append(held[axis])
            elif filler is None:
                found.append(part.stack)
            else:
                start, stop = held[filler]
                found.append((start + part.stack[0], stop + part.stack[0]))
        return tuple(found)


def padded_vocabulary(size: int, tp: int) -> int:
    """The vocabulary's size padded only as far as ``tp`` needs it."""
    return -(-size // tp) * tp
