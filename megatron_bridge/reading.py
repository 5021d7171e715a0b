"""Moves boxes of tensors between HuggingFace's axes and Megatron's."""

import math

import torch
from torch import Tensor

from megatron_bridge import regions
from megatron_bridge.mappings import Piece, Weight
from megatron_bridge.regions import Box
from megatron_bridge.source import Ranges, Source


def read_box(
    source: Source,
    name: str,
    sizes: tuple[tuple[int, ...], ...],
    box: Box,
    *,
    prefix: Ranges = (),
    first_row: int = 0,
) -> Tensor:
    """A box of a tensor, with one dimension per axis; a view where the source gives views.

    Args:
        sizes: of each dimension's axes.
        prefix: the tensor's leading dimensions that ``sizes`` leaves out; each one index.
        first_row: where the axes begin on the first dimension.
    """
    ranges, view, index = list(prefix), [], []
    for dimension in sizes:
        inside, box = box[: len(dimension)], box[len(dimension) :]
        start, axes = 0, dimension
        pinned = 0
        # Slow axes at one index only move the start: what is read stays small.
        while len(inside) - pinned > 1 and inside[pinned][1] - inside[pinned][0] == 1:
            start += inside[pinned][0] * math.prod(axes[1:])
            axes, pinned = axes[1:], pinned + 1
        low, high = regions.cover(axes, inside[pinned:])
        offset = start + (first_row if len(ranges) == len(prefix) else 0)
        ranges.append((low + offset, high + offset))
        view += [*[1] * pinned, inside[pinned][1] - inside[pinned][0], *axes[1:]]
        index += [slice(None)] * (pinned + 1) + [*regions.slices(inside[pinned + 1 :])]
    return source.read(name, tuple(ranges)).reshape(view)[tuple(index)]


def read_part(source: Source, weight: Weight, piece: Piece) -> Tensor:
    """The piece's elements from its HuggingFace tensor, in the order of Megatron's axes."""
    part = weight.parts[piece.part]
    found = read_box(source, part.name, part.sizes, piece.huggingface, first_row=part.rows[0])
    return in_megatron_order(found, piece)


def in_megatron_order(tensor: Tensor, piece: Piece) -> Tensor:
    """A part's box [one dimension per HuggingFace axis] with Megatron's axes instead."""
    kept = [axis for axis in piece.order if axis is not None]
    dropped = [axis for axis in range(tensor.dim()) if axis not in kept]
    ordered = tensor.permute([*dropped, *kept])
    return ordered.reshape(regions.lengths(piece.megatron))


def in_huggingface_order(tensor: Tensor, piece: Piece) -> Tensor:
    """The inverse of ``in_megatron_order``."""
    target = regions.lengths(piece.huggingface)
    kept = [axis for axis in piece.order if axis is not None]
    dropped = [axis for axis in range(len(target)) if axis not in kept]
    squeezed = tensor.reshape([target[axis] for axis in [*dropped, *kept]])
    return squeezed.permute([[*dropped, *kept].index(axis) for axis in range(len(target))])


def read_megatron(source: Source, weight: Weight, box: Box) -> Tensor:
    """A box of a Megatron tensor from HuggingFace tensors, one dimension per axis.

    Padding is zero. Where the box is one piece the result may be a view.
    """
    pieces = list(weight.pieces(box))
    if len(pieces) == 1 and pieces[0].megatron == box:
        return read_part(source, weight, pieces[0])
    dtype = source.tensors()[weight.parts[0].name].dtype
    result = torch.empty(regions.lengths(box), dtype=dtype)
    fill_megatron(source, weight, box, result)
    return result


def fill_megatron(source: Source, weight: Weight, box: Box, target: Tensor) -> None:
    """Copy a box of a Megatron tensor into ``target``, which has one dimension per axis.

    Padding is zero. Each element moves once, and casts as it moves.
    """
    pieces = list(weight.pieces(box))
    if sum(regions.volume(piece.megatron) for piece in pieces) != regions.volume(box):
        target.zero_()
    for piece in pieces:
        inside = regions.slices(regions.relative(piece.megatron, box))
        target[inside].copy_(read_part(source, weight, piece))
