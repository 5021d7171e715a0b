"""Cutting a plan's copies into buckets of bounded size, and moving elements in and out of them.

A copy is the same sequence of elements on both sides; a piece is a range of it. Both sides compute
the same buckets from the plan alone, so that only elements travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron_bridge import regions
from megatron_bridge.regions import Box, Interval
from megatron_bridge.reshard import Copy, ReshardPlan

TRAILER = 32
"""Bytes behind a bucket: the SHA-256 over the publication's nonce, its number and its bytes."""
STAGING = 4 << 20
"""Bytes that are moved or hashed at once: they stay in the processor's cache in between."""
_ALIGNMENT = 8  # bytes; a multiple of every dtype's size


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of copy `copy` of the plan, at byte `offset` of a bucket."""

    copy: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """What travels at once; `bytes` without the trailer."""

    pieces: tuple[Piece, ...]
    bytes: int


def cut(plan: ReshardPlan, copies: Sequence[int], limit: int) -> tuple[Bucket, ...]:
    """`copies` in order, as buckets of at most `limit` bytes.

    A copy that is larger is cut along its outermost dimensions.

    Raises:
        ValueError: `limit` is smaller than any element.
    """
    if limit < _ALIGNMENT:
        raise ValueError(f"a bucket of {limit} bytes holds nothing; give at least {_ALIGNMENT}.")
    found: list[Bucket] = []
    pieces: list[Piece] = []
    at = 0
    for number in copies:
        copy = plan.copies[number]
        size = plan.bytes_of(copy) // copy.elements
        for start, stop in ranges(regions.lengths(copy.target), size, limit):
            if pieces and at + (stop - start) * size > limit:
                found.append(Bucket(tuple(pieces), at))
                pieces, at = [], 0
            pieces.append(Piece(number, start, stop, at))
            end = at + (stop - start) * size
            at = min(-(-end // _ALIGNMENT) * _ALIGNMENT, max(end, limit))
    if pieces:
        found.append(Bucket(tuple(pieces), at))
    return tuple(found)


def ranges(sizes: Sequence[int], itemsize: int, limit: int) -> Iterator[Interval]:
    """Ranges of a box's elements, at most `limit` bytes each, that end at whole slices of it."""
    total = prod(sizes)
    if total * itemsize <= limit:
        yield 0, total
        return
    axis = next(n for n in range(len(sizes) + 1) if prod(sizes[n:]) * itemsize <= limit)
    unit = prod(sizes[axis:])
    step = limit // (unit * itemsize) * unit
    for start in range(0, total, step):
        yield start, min(start + step, total)


def gather(values: Tensor, start: int, stop: int, into: Tensor | None = None) -> Tensor:
    """Elements [start, stop) of `values`, of any shape and strides, as a flat CPU tensor.

    `into`, flat and of their number, takes them; without it they are not copied where they lie in a
    row on the CPU already.
    """
    if into is None and values.is_contiguous():
        return values.view(-1)[start:stop].cpu()
    flat = torch.empty(stop - start, dtype=values.dtype) if into is None else into
    at = 0
    for box in regions.of_range(values.shape, (start, stop)):
        part = values[regions.slices(box)]
        flat[at : at + part.numel()].view(part.shape).copy_(part)
        at += part.numel()
    return flat


def scatter(flat: Tensor, parameter: Tensor, target: Box, start: int) -> None:
    """Put `flat` at the elements of `parameter`'s box `target` from `start` on."""
    at = 0
    for box in inner_boxes(target, start, start + flat.numel()):
        count = regions.volume(box)
        into = parameter[regions.slices(box)]
        into.copy_(flat[at : at + count].view(into.shape))
        at += count


def inner_boxes(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of `box` as boxes in the coordinates of what `box` is in."""
    for inner in regions.of_range(regions.lengths(box), (start, stop)):
        yield tuple((a + low, b + low) for (a, b), (low, _) in zip(inner, box, strict=True))


def pack(pieces: Iterable[tuple[Piece, Tensor]], area: Tensor) -> None:
    """Fill `area` (uint8, from its start) with a bucket's pieces, each of its copy's values."""
    for piece, source in pieces:
        size = (piece.stop - piece.start) * source.itemsize
        flat = area[piece.offset : piece.offset + size].view(source.dtype)
        gather(source, piece.start, piece.stop, flat)


def entries(plan: ReshardPlan, bucket: Bucket) -> list[list]:
    """The bucket in the loader's words: [parameter, box, offset] of each box that it fills."""
    found = []
    for piece in bucket.pieces:
        copy = plan.copies[piece.copy]
        size = plan.bytes_of(copy) // copy.elements
        at = piece.offset
        for box in inner_boxes(copy.target, piece.start, piece.stop):
            found.append([copy.parameter, [list(interval) for interval in box], at])
            at += regions.volume(box) * size
    return found


def trailer(nonce: str, number: int, payload: Tensor) -> bytes:
    """What goes behind the bucket `number`, whose bytes are `payload` (uint8, on any device)."""
    digest = hashlib.sha256(f"{nonce} {number} ".encode())
    for part in payload.split(STAGING):
        digest.update(part.cpu().numpy().data)
    return digest.digest()


class CopiesDigest:
    """SHA-256 over the bytes of copies, one after the other, as their sender and receiver see.

    Attributes:
        bytes: taken so far.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.bytes = 0

    def add(self, flat: Tensor) -> None:
        """Take a flat CPU tensor's bytes."""
        self.bytes += flat.nbytes
        self._digest.update(flat.contiguous().view(torch.uint8).numpy().data)

    def add_all(self, values: Tensor) -> None:
        """Take all elements of `values`, of any strides, a bounded number at once."""
        for start, stop in ranges(values.shape, values.itemsize, STAGING):
            self.add(gather(values, start, stop))

    def hex(self) -> str:
        """64 digits."""
        return self._digest.hexdigest()


def copies_digest(plan: ReshardPlan, copies: Sequence[int], parameters: Sequence[Tensor]) -> str:
    """The digest of copies as they lie in an engine rank's parameters."""
    digest = CopiesDigest()
    for number in copies:
        copy: Copy = plan.copies[number]
        digest.add_all(parameters[copy.parameter][regions.slices(copy.target)])
    return digest.hex()
