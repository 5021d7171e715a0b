"""What a conversion writes, cut into units that fit the memory bound."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_bridge.source import Ranges, TensorInfo

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Item:
    """A tensor of the result.

    Attributes:
        name: in the source that is read, and in the result.
        dtype: its dtype, in both.
        shape: of the whole tensor.
        rectangles: its parts; a unit never crosses their borders.
        file: number of the file that all of it is written into; always 0 when each worker writes
            into a file of its own.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rectangles: tuple[Ranges, ...]
    file: int = 0

    @property
    def info(self) -> TensorInfo:
        """Dtype and whole shape."""
        return TensorInfo(self.dtype, self.shape)

    @property
    def working_bytes(self) -> int:
        """Size of the whole tensor where an element counts as float32 at least.

        Casts, dequantising and merging an adapter compute in float32.
        """
        return math.prod(self.shape) * max(self.dtype.itemsize, _FLOAT32_BYTES)


@dataclass(frozen=True, slots=True)
class Unit:
    """A rectangle that one worker reads and writes in one go."""

    item: Item
    ranges: Ranges

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return math.prod(high - low for low, high in self.ranges)

    @property
    def bytes(self) -> int:
        """Size of what it writes."""
        return self.elements * self.item.dtype.itemsize


def make_units(items: Iterable[Item], unit_bytes: int) -> list[Unit]:
    """Units of at most ``unit_bytes``, where an element counts as float32 at least."""
    return [
        Unit(item, ranges)
        for item in items
        for rectangle in item.rectangles
        for ranges in cut(rectangle, unit_bytes // max(item.dtype.itemsize, _FLOAT32_BYTES))
    ]


def cut(ranges: Ranges, limit: int) -> Iterator[Ranges]:
    """Cut a rectangle into parts of at most ``limit`` elements, whole rows where they fit."""
    assert limit > 0
    if math.prod(high - low for low, high in ranges) <= limit:
        yield ranges
        return
    (low, high), inner = ranges[0], ranges[1:]
    rows = limit // math.prod(stop - start for start, stop in inner)
    if rows:
        for start in range(low, high, rows):
            yield ((start, min(start + rows, high)), *inner)
        return
    for row in range(low, high):
        for part in cut(inner, limit):
            yield ((row, row + 1), *part)


def fingerprint(units: Iterable[Unit]) -> str:
    """A digest of the units in order: names, dtypes and places."""
    digest = hashlib.sha256()
    for unit in units:
        item = unit.item
        digest.update(f"{item.name} {item.dtype} {unit.ranges}\n".encode())
    return digest.hexdigest()
