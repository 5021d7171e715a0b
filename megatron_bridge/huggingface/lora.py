"""One tensor with an adapter merged: the numbers of PEFT, rectangle by rectangle."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bridge.huggingface.safetensors_file import inside
from megatron_bridge.source import Ranges, TensorInfo

# BLAS gives an element of a product the same bits whatever the rectangle, if that starts and ends
# at such multiples (or the matrix's end) and is not small.
_ALIGNED = 64
_LEAST = 256
_TILE = (512, 2048)
_NORM_ROWS = 128

_Interval = tuple[int, int]


@dataclass(frozen=True)
class Replaced:
    """A tensor that the adapter holds whole."""

    info: TensorInfo
    read_whole: Callable[[Ranges], Tensor]

    def read(self, ranges: Ranges) -> Tensor:
        return self.read_whole(ranges).to(self.info.dtype)


@dataclass(frozen=True)
class Lora:
    """Weight [rows, columns] + scale * left [rows, rank] @ right [rank, columns].

    For an embedding and for transposed layers the product is that of the transposes, as in PEFT.
    """

    info: TensorInfo
    weight: Callable[[Ranges], Tensor]
    a: Tensor
    b: Tensor
    scale: float
    transposed: bool
    rounded: bool  # the product is rounded to the weight's dtype before it is added
    magnitude: Tensor | None

    def read(self, ranges: Ranges) -> Tensor:
        assert inside(self.info.shape, ranges), f"{ranges} is not inside {self.info.shape}"
        rows, columns = ranges
        result = self.weight(ranges).clone(memory_format=torch.contiguous_format)
        if self.magnitude is not None:
            self._merge_dora(result, rows, columns)
            return result
        for part_rows, part_columns in _tiles(rows, columns):
            part = _part(result, ranges, (part_rows, part_columns))
            product = self._product(part_rows, part_columns)
            part += product.to(part.dtype) if self.rounded else product
        return result

    def _merge_dora(self, result: Tensor, rows: _Interval, columns: _Interval) -> None:
        """In place: magnitude / norm of the merged row * merged row."""
        assert self.magnitude is not None
        width = self.info.shape[1]
        for begin in range(rows[0], rows[1], _NORM_ROWS):
            some = (begin, min(begin + _NORM_ROWS, rows[1]))
            merged = self.weight((some, (0, width))).to(self._dtype, copy=True)
            for _, part in _tiles(some, (0, width)):
                merged[:, slice(*part)] += self._product(some, part)
            norm = torch.linalg.norm(merged, dim=1)
            factor = self.magnitude[slice(*some)].to(self._dtype) / norm
            merged = merged[:, slice(*columns)].mul_(factor[:, None])
            result[some[0] - rows[0] : some[1] - rows[0]] = merged

    @property
    def _dtype(self) -> torch.dtype:
        """PEFT keeps half-precision factors in float32 and others in the weight's dtype."""
        return torch.promote_types(self.info.dtype, torch.float32)

    def _product(self, rows: _Interval, columns: _Interval) -> Tensor:
        """scale * B @ A of a rectangle, with the bits that the whole product has there."""
        if self.transposed:
            rows, columns = columns, rows
        outer = _grown(rows, self.b.shape[0])
        inner = _grown(columns, self.a.shape[1])
        b = self.b[slice(*outer)].to(self._dtype)
        a = self.a[:, slice(*inner)].to(self._dtype)
        product = (b @ a)[
            rows[0] - outer[0] : rows[1] - outer[0], columns[0] - inner[0] : columns[1] - inner[0]
        ]
        return (product.t() if self.transposed else product) * self.scale


def _grown(interval: _Interval, size: int) -> _Interval:
    first, last = interval
    first = first // _ALIGNED * _ALIGNED
    last = min(size, -(-last // _ALIGNED) * _ALIGNED)
    if last - first < _LEAST:
        first = max(0, min(first, (size - _LEAST) // _ALIGNED * _ALIGNED))
        last = min(size, max(last, first + _LEAST))
    return first, last


def _tiles(rows: _Interval, columns: _Interval) -> Iterator[tuple[_Interval, _Interval]]:
    for top in range(*rows, _TILE[0]):
        for left in range(*columns, _TILE[1]):
            yield (top, min(top + _TILE[0], rows[1])), (left, min(left + _TILE[1], columns[1]))


def _part(tensor: Tensor, ranges: Ranges, part: Ranges) -> Tensor:
    """The view of ``part`` in a tensor that holds ``ranges``."""
    return tensor[
        tuple(
            slice(first - origin, last - origin)
            for (first, last), (origin, _) in zip(part, ranges, strict=True)
        )
    ]
