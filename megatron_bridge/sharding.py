"""How a tensor is cut over tensor-parallel ranks, and put together again. Pure functions."""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor


class Shard(Enum):
    """The dimension that tensor parallelism cuts; None when every rank holds the whole tensor."""

    REPLICATED = None
    ROWS = 0
    COLUMNS = 1


def bounds(size: int, tp: int, rank: int) -> tuple[int, int]:
    """First and one past the last index that ``rank`` holds of ``size``."""
    assert size % tp == 0, f"tp={tp} does not divide {size}"
    part = size // tp
    return rank * part, (rank + 1) * part


def local_index(shape: Sequence[int], shard: Shard, tp: int, rank: int) -> tuple[slice, ...]:
    """The slices that cut ``rank``'s part out of a tensor of ``shape``."""
    index = [slice(0, size) for size in shape]
    if shard is not Shard.REPLICATED:
        index[shard.value] = slice(*bounds(shape[shard.value], tp, rank))
    return tuple(index)


def cut(tensor: Tensor, shard: Shard, tp: int, rank: int) -> Tensor:
    """``rank``'s part of a whole tensor, as a view."""
    return tensor[local_index(tensor.shape, shard, tp, rank)]


def join(parts: Sequence[Tensor], shard: Shard) -> Tensor:
    """The whole tensor from every rank's part, in rank order."""
    if shard is Shard.REPLICATED or len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), dim=shard.value)
