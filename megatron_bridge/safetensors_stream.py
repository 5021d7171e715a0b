"""Writes a safetensors file one tensor at a time, holding one tensor in memory.

The format puts all names, dtypes, shapes and offsets into a header in front of the data; they are
known before the first tensor arrives.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_stream(
    path: Path, specs: list[TensorSpec], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """Write the next ``len(specs)`` of ``tensors``, which must come as ``specs`` announce them."""
    with open(path, "wb") as file:
        file.write(_header(specs))
        for spec in specs:
            name, tensor = next(tensors)
            announced = (spec.name, spec.dtype, spec.shape)
            assert (name, tensor.dtype, tuple(tensor.shape)) == announced, (name, spec)
            data = tensor.cpu().contiguous().view(-1).view(torch.uint8)
            file.write(memoryview(data.numpy()))  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())


def _header(specs: list[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.bytes],
        }
        offset += spec.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
