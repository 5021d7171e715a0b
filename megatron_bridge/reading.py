"""Moves boxes of tensors between HuggingFace's axes and Megatron's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_bridge import regions
from megatron_bridge.mappings import Weight
from megatron_bridge.regions import Box
from megatron_bridge.row_shape import Piece, RowShape
from megatron_bridge.source import Ranges, Source

# Layers and experts share what depends on shapes alone; working it out costs more than a copy.
_KEPT = 1024


@dataclass(frozen=True)
class _Cut:
    """A box of a tensor as the rectangle of its dimensions that holds it.

    Attributes:
        ranges: the rectangle.
        view: its sizes with one dimension per axis.
        index: cuts the box out of that; None: it is all of it.
    """

    ranges: Ranges
    view: tuple[int, ...]
    index: tuple[slice, ...] | None

    def read(self, source: Source, name: str, prefix: Ranges = ()) -> Tensor:
        found = source.read(name, (*prefix, *self.ranges))
        if found.shape != self.view:
            found = found.reshape(self.view)
        return found if self.index is None else found[self.index]


def read_box(
    source: Source, name: str, sizes: tuple[tuple[int, ...], ...], box: Box, prefix: Ranges = ()
) -> Tensor:
    """A box of a tensor, with one dimension per axis; a view where the source gives views.

    Args:
        sizes: of each dimension's axes.
        prefix: the tensor's leading dimensions that ``sizes`` leaves out; each one index.
    """
    return _cut(sizes, box, 0).read(source, name, prefix)


@lru_cache(_KEPT)
def _cut(sizes: tuple[tuple[int, ...], ...], box: Box, first_row: int) -> _Cut:
    """``first_row``: where the axes begin on the first dimension."""
    ranges, view, index = [], [], []
    for dimension in sizes:
        inside, box = box[: len(dimension)], box[len(dimension) :]
        start, axes = 0 if ranges else first_row, dimension
        pinned = 0
        # Slow axes at one index only move the start: what is read stays small.
        while len(inside) - pinned > 1 and inside[pinned][1] - inside[pinned][0] == 1:
            start += inside[pinned][0] * math.prod(axes[1:])
            axes, pinned = axes[1:], pinned + 1
        low, high = regions.cover(axes, inside[pinned:])
        ranges.append((low + start, high + start))
        first = inside[pinned][1] - inside[pinned][0]
        view += [*[1] * pinned, first, *axes[1:]]
        index += [(0, 1)] * pinned + [(0, first), *inside[pinned + 1 :]]
    whole = tuple(index) == regions.full(view)
    return _Cut(tuple(ranges), tuple(view), None if whole else regions.slices(tuple(index)))


class _Move(NamedTuple):
    """One piece's way from its HuggingFace tensor to a box of a Megatron tensor.

    Attributes:
        template: the tensor's name, with ``{layer}`` and ``{expert}``.
        cut: its elements there.
        axes: their axes in Megatron's order, those that Megatron has not first; None: as they are.
        shape: with Megatron's axes.
        inside: where they belong in the box; None: they are all of it.
    """

    template: str
    cut: _Cut
    axes: tuple[int, ...] | None
    shape: tuple[int, ...]
    inside: tuple[slice, ...] | None

    def read(self, source: Source, weight: Weight) -> Tensor:
        """The elements, with one dimension per Megatron axis."""
        found = self.cut.read(source, weight.name_of(self.template))
        if self.axes is not None:
            found = found.permute(self.axes)
        return found if found.shape == self.shape else found.reshape(self.shape)


@lru_cache(_KEPT)
def _moves(shape: RowShape, expert: int | None, box: Box) -> tuple[tuple[_Move, ...], bool]:
    """What fills a box of a Megatron tensor; and whether that leaves nothing out."""
    pieces = list(shape.pieces(expert, box))
    filled = sum(regions.volume(piece.megatron) for piece in pieces) == regions.volume(box)
    return tuple(_move(shape, piece, box) for piece in pieces), filled


def _move(shape: RowShape, piece: Piece, box: Box) -> _Move:
    part = shape.parts[piece.part]
    axes = _axes(piece)
    return _Move(
        template=part.name,
        cut=_cut(part.sizes, piece.huggingface, part.rows[0]),
        axes=None if axes == tuple(range(len(axes))) else axes,
        shape=regions.lengths(piece.megatron),
        inside=None
        if piece.megatron == box
        else regions.slices(regions.relative(piece.megatron, box)),
    )


def _axes(piece: Piece) -> tuple[int, ...]:
    """The part's axes in Megatron's order, behind those that Megatron has not (each one index)."""
    kept = [axis for axis in piece.order if axis is not None]
    return (*(axis for axis in range(len(piece.huggingface)) if axis not in kept), *kept)


def in_huggingface_order(tensor: Tensor, piece: Piece) -> Tensor:
    """A piece [one dimension per Megatron axis] with its HuggingFace part's axes instead."""
    target, axes = regions.lengths(piece.huggingface), _axes(piece)
    squeezed = tensor.reshape([target[axis] for axis in axes])
    return squeezed.permute(_inverse(axes))


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def read_megatron(source: Source, weight: Weight, box: Box) -> Tensor:
    """A box of a Megatron tensor from HuggingFace tensors, one dimension per axis.

    Padding is zero. Where the box is one piece the result may be a view.
    """
    moves, _ = _moves(weight.shape_of, weight.slice_of, box)
    if len(moves) == 1 and moves[0].inside is None:
        return moves[0].read(source, weight)
    dtype = source.tensors()[weight.parts[0].name].dtype
    result = torch.empty(regions.lengths(box), dtype=dtype)
    fill_megatron(source, weight, box, result)
    return result


def fill_megatron(source: Source, weight: Weight, box: Box, target: Tensor) -> None:
    """Copy a box of a Megatron tensor into ``target``, which has one dimension per axis.

    Padding is zero. Each element moves once, and casts as it moves.
    """
    moves, filled = _moves(weight.shape_of, weight.slice_of, box)
    if not filled:
        target.zero_()
    for move in moves:
        inside = target if move.inside is None else target[move.inside]
        inside.copy_(move.read(source, weight))
