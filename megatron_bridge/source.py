"""What every kind of checkpoint is to the bridge: named tensors, read rectangle by rectangle."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# A rectangle of a tensor: one half-open interval per dimension.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Source(Protocol):
    """Tensors by name."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, in the source's order."""
        ...

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """The rectangle ``ranges`` of one tensor.

        The result may be a view of a mapped file: never write into it, and copy what is to stay.
        """
        ...


def whole(shape: tuple[int, ...]) -> Ranges:
    """The rectangle that is all of a tensor."""
    return tuple((0, size) for size in shape)
