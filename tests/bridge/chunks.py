"""Small torch_dist checkpoints for the tests, written chunk by chunk."""

import dataclasses
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_bridge.source import Ranges, TensorInfo, whole
from megatron_bridge.torch_dist.reader import TorchDist
from megatron_bridge.torch_dist.writer import ChunkFile, ChunkRecord, finish

HALVES = (MetadataIndex("t", (0, 0)), MetadataIndex("t", (3, 0)))


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


def write_halves(folder: Path) -> Path:
    """Two tensors; 't' [6, 4] lies in two files, 3 rows each; 'u' [5] behind its first half."""
    folder.mkdir()
    tensor = torch.arange(24.0).reshape(6, 4)
    with ChunkFile(folder / "a.distcp") as a, ChunkFile(folder / "b.distcp") as b:
        records = [a.add("t", (0, 0), tensor[:3]), b.add("t", (3, 0), tensor[3:])]
        records.append(a.add("u", (0,), torch.ones(5)))
    infos = {"t": TensorInfo(torch.float32, (6, 4)), "u": TensorInfo(torch.float32, (5,))}
    finish(folder, infos, records)
    return folder


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    """Change .metadata as if its writer had meant it so."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 (our own file)
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def refuses(folder: Path, *texts: str) -> None:
    """Opening, checking or reading 't' raises one ValueError that says all of this."""
    with pytest.raises(ValueError) as error:
        source = TorchDist(folder)
        source.check()
        source.read("t", ((0, 6), (0, 4)))
    for text in texts:
        assert text in str(error.value), str(error.value)


def moved(index: MetadataIndex, **fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        info = metadata.storage_data[index]
        metadata.storage_data[index] = dataclasses.replace(info, **fields)

    return change


class Attack:
    """A pickle that, once loaded as pickles are, leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.command = f"touch {path}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)
