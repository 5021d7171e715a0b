"""Ragged rows in one tensor, and tensors as buffers that cross processes without a copy.

Between processes a tensor is a NumPy array whose buffer travels out of band (pickle protocol 5),
so that Ray's object store hands it over without a copy, and a view carries its own rows only.

A received tensor may therefore lie in memory shared by every receiver: nothing may write to it in
place. Use ``clone()`` first where in-place work is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

RUN = 1 << 17
"""Values that are worked on at a time, so that temporaries stay in a processor's cache."""


class Ragged:
    """Rows of different lengths in one tensor.

    ``values`` has shape [sum of lengths, ...]; ``offsets`` is int64 [N + 1] on the CPU, starts at
    0 and ends at ``len(values)``; row i is ``values[offsets[i]:offsets[i + 1]]``. Rows may be
    empty. Treat both tensors as read-only.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() == 0:
            raise ValueError(
                f"offsets must be int64 of shape [rows + 1], got {offsets.dtype} "
                f"of shape {list(offsets.shape)}"
            )
        if values.dim() == 0:
            raise ValueError("values must have at least one dimension, got a scalar")
        offsets = offsets.cpu()
        if offsets[0] != 0 or offsets[-1] != values.shape[0] or bool((offsets.diff() < 0).any()):
            raise ValueError(
                f"offsets must rise from 0 to the {values.shape[0]} values, got "
                f"{offsets[0].item()} to {offsets[-1].item()} over {offsets.numel() - 1} rows"
            )
        self.values = values
        self.offsets = offsets

    @classmethod
    def from_rows(
        cls, rows: Sequence[Tensor | Sequence[Any]], dtype: torch.dtype | None = None
    ) -> Ragged:
        """One row per tensor or sequence of numbers; ``dtype`` is needed when there is no value."""
        offsets = _offsets([len(row) for row in rows])
        if rows and isinstance(rows[0], Tensor):
            values = torch.cat([torch.as_tensor(row) for row in rows])
            return cls(values if dtype is None else values.to(dtype), offsets)
        flat = list(chain.from_iterable(rows))
        if not flat and dtype is None:
            raise ValueError("rows without a value have no dtype of their own: pass dtype")
        return cls(torch.tensor(flat, dtype=dtype), offsets)

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts in order; neighbouring views of one tensor are joined uncopied."""
        if len(parts) == 1:
            return parts[0]
        lengths = torch.cat([part.lengths for part in parts])
        return Ragged(join([part.values for part in parts]), _offsets(lengths))

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """Length of every row, int64 [N]."""
        return self.offsets.diff()

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets."""
        return self.values.nbytes + self.offsets.nbytes

    def __getitem__(self, index: Any) -> Any:
        """``[i]`` is row i (a view of shape [length, ...]), ``[a:b]`` a ragged view of rows."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"a ragged field is sliced with step 1 alone, got {step}")
            return self._slice(start, max(start, stop))
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"row {index} of {size}")
        start, stop = self.offsets[index % size : index % size + 2].tolist()
        return self.values[start:stop]

    def _slice(self, start: int, stop: int) -> Ragged:
        offsets = self.offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return Ragged(self.values[first:last], offsets - first if first else offsets)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows())

    def rows(self) -> list[Tensor]:
        """Every row as a view."""
        return list(self.values.split(self.lengths.tolist())) if len(self) else []

    def with_values(self, values: Tensor) -> Ragged:
        """Other values in the same rows; ``values`` has shape [sum of lengths, ...]."""
        return Ragged(values, self.offsets)

    def runs(self, values: int = RUN) -> Iterator[tuple[slice, slice]]:
        """Runs of rows that cover all, each of about ``values`` values or one longer row.

        What is computed run by run stays in the processor's cache, and its temporaries are small.

        Yields:
            The rows of a run, and the span of their values.
        """
        return _runs(self.offsets, values)

    def take(self, rows: Sequence[int]) -> Ragged:
        """A copy of the given rows, in the given order."""
        if not rows:
            return self[:0]
        return Ragged.from_rows([self[row] for row in rows])

    def clone(self) -> Ragged:
        """A copy that may be written to."""
        return Ragged(self.values.clone(), self.offsets.clone())

    def equals(self, other: object) -> bool:
        """Same rows, dtype and values."""
        return (
            isinstance(other, Ragged)
            and self.dtype == other.dtype
            and torch.equal(self.offsets, other.offsets)
            and torch.equal(self.values, other.values)
        )

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {self.values.shape[0]} values, {self.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_ragged, (pack(self.values), pack(self.offsets))


def spread_over(values_N: Tensor, lengths_N: Tensor) -> Tensor:
    """``[sum of lengths, ...]`` each value as often as its row is long; carries no gradient."""
    offsets = _offsets(lengths_N)
    result = values_N.new_empty(int(offsets[-1]), *values_N.shape[1:])
    for rows, span in _runs(offsets, RUN):
        # A narrow index is several times as fast as the wide one of repeat_interleave on values.
        index = torch.repeat_interleave(lengths_N[rows].int())
        torch.index_select(values_N[rows].detach(), 0, index, out=result[span])
    return result


def _runs(offsets: Tensor, values: int) -> Iterator[tuple[slice, slice]]:
    wanted = torch.arange(values, max(values, int(offsets[-1])), values)
    bounds = torch.searchsorted(offsets, wanted, right=True) - 1
    bounds = torch.cat([bounds.new_zeros(1), bounds, bounds.new_full((1,), len(offsets) - 1)])
    bounds = bounds.unique()
    for (first, start), (last, stop) in pairwise(
        zip(bounds.tolist(), offsets[bounds].tolist(), strict=True)
    ):
        yield slice(first, last), slice(start, stop)


@dataclass(frozen=True)
class Packed:
    """A tensor as a NumPy array; ``dtype`` is torch's name where NumPy has no such type."""

    array: np.ndarray
    dtype: str | None


class _Shared:
    """Shows an array's memory as writable, which is what torch asks of a tensor's memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array  # keeps the memory alive
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(tensor: Tensor) -> Packed:
    tensor = tensor.detach().cpu().contiguous()
    try:
        return Packed(tensor.numpy(), None)
    except TypeError:  # bfloat16 and the 8-bit floats, unknown to NumPy
        carrier = tensor.view(_CARRIERS[tensor.element_size()])
        return Packed(carrier.numpy(), str(tensor.dtype).removeprefix("torch."))


def unpack(packed: Packed) -> Tensor:
    """The tensor over the same memory, which stays read-only by agreement."""
    array = packed.array
    tensor = torch.from_numpy(array if array.flags.writeable else np.asarray(_Shared(array)))
    return tensor if packed.dtype is None else tensor.view(getattr(torch, packed.dtype))


def _unpack_ragged(values: Packed, offsets: Packed) -> Ragged:
    return Ragged(unpack(values), unpack(offsets))


def _offsets(lengths: Tensor | Sequence[int]) -> Tensor:
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def join(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` that gives a view when the parts lie one behind the other in one storage."""
    filled = [part for part in parts if part.numel()]
    if len(filled) < 2:
        return filled[0] if filled else parts[0]
    first = filled[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in filled:
        alike = part.shape[1:] == first.shape[1:] and part.dtype == first.dtype
        inside = part.untyped_storage().data_ptr() == storage and part.data_ptr() == end
        if not (alike and inside and part.is_contiguous()):
            return torch.cat(list(parts))
        end += part.nbytes
    return first.as_strided(
        (sum(part.shape[0] for part in filled), *first.shape[1:]), first.stride()
    )
