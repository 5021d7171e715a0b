"""Small torch_dist checkpoints for the tests, written chunk by chunk."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.source import Ranges, TensorInfo, whole
from megatron_bridge.torch_dist.writer import ChunkFile, ChunkRecord, finish


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal in every bit, whatever the dtype can compare."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(_bytes(one), _bytes(other))


def index(ranges: Ranges) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in ranges)


def info(tensor: Tensor) -> TensorInfo:
    return TensorInfo(tensor.dtype, tuple(tensor.shape))


def add(file: ChunkFile, key: str, tensor: Tensor, ranges: Ranges) -> ChunkRecord:
    return file.add(key, [start for start, _ in ranges], tensor[index(ranges)])


def write(folder: Path, tensors: dict[str, Tensor], **common: Any) -> list[ChunkRecord]:
    """A checkpoint of whole tensors in one file."""
    folder.mkdir(exist_ok=True)
    with ChunkFile(folder / "__0_0.distcp") as file:
        records = [add(file, key, t, whole(tuple(t.shape))) for key, t in tensors.items()]
    finish(folder, {key: info(tensor) for key, tensor in tensors.items()}, records, common)
    return records
