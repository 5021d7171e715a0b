"""The safetensors files of a folder: how tensors are spread over them, their names and headers."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_bridge.huggingface.safetensors_file import DTYPE_NAMES, METADATA, listed
from megatron_bridge.source import TensorInfo

_SINGLE = "model.safetensors"
_ALIGNMENT = 8


def plan_shards(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[dict[str, TensorInfo]]:
    """Cut the tensors, in order, into files of at most ``shard_bytes`` (or of one tensor)."""
    if shard_bytes < 1:
        raise ValueError(f"a shard of {shard_bytes} bytes holds nothing; give 1 byte or more")
    shards: list[dict[str, TensorInfo]] = [{}]
    used = 0
    for name, info in tensors.items():
        if shards[-1] and used + info.bytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = info
        used += info.bytes
    return shards


def write_header(path: Path, shard: Mapping[str, TensorInfo]) -> None:
    """A file of its final size whose data reads as zeros.

    Wide dtypes come first, so that every tensor starts at a multiple of its width.
    """
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    offset = 0
    for name, info in sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize):
        entries[name] = {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.bytes],
        }
        offset += info.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
        file.flush()
        os.fsync(file.fileno())


def file_names(count: int) -> list[str]:
    if count == 1:
        return [_SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def files_of(folder: Path) -> list[Path]:
    """The files that ``create`` made, all of them."""
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    found = sorted(folder.glob("model-*-of-*.safetensors"))
    count = found[0].stem.rpartition("-")[2] if found else ""
    files = [folder / name for name in file_names(int(count) if count.isdecimal() else 1)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ValueError(f"{folder} lacks {listed(missing, ', ')}; start anew")
    return files
