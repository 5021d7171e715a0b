"""Writes a ``torch_dist`` checkpoint chunk by chunk, from any number of processes.

Each process appends chunks to a file of its own and gets a small record of each, which it can keep
in a journal: after a kill, a file is opened again behind the last record in the journal. Once all
records are together, ``finish`` writes the metadata, and the folder is a checkpoint.

Stock loaders read whole chunks: a rank that needs a part of one loads all of it into memory. Cut
along the layout that will read, or into some tens of MB.
"""

import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_bridge.source import TensorInfo
from megatron_bridge.torch_dist.chunk_file import SUFFIX, ChunkFile, ChunkRecord
from megatron_bridge.torch_dist.metadata import BACKEND, COMMON, CONFIG, INDEX, some
from megatron_bridge.torch_dist.tiling import Tiling

__all__ = ["ChunkFile", "ChunkRecord", "finish"]

# Holds the extra states; no rank has this number.
_STATES = f"__states_0{SUFFIX}"
# What Megatron-LM looks for in common.pt. The iteration of a release is 0.
_COMMON = {"checkpoint_version": 3.0, "iteration": 0}


def finish(
    folder: str | Path,
    infos: Mapping[str, TensorInfo],
    records: Iterable[ChunkRecord],
    common: Mapping[str, Any] | None = None,
) -> None:
    """Make a folder of chunk files a checkpoint; ``metadata.json``, the last file, says that it is.

    Args:
        folder: holds the files that the records name.
        infos: every tensor's dtype and whole shape; the checkpoint lists them in this order.
        records: every chunk. A tensor's chunks may be any rectangles that tile it.
        common: further entries of ``common.pt``, plain values: any loader must be able to read
            them without running code. ``content_metadata``, where present, is a dictionary that
            Megatron hands to the model's ``sharded_state_dict``; it is needed only to describe
            an optimizer.

    Raises:
        ValueError: when the chunks are not exactly the tensors, or a file is missing or short.
    """
    folder = Path(folder)
    by_key: dict[str, list[ChunkRecord]] = {key: [] for key in infos}
    unknown = set()
    files: dict[str, int] = {}
    for record in records:
        if record.key in by_key:
            by_key[record.key].append(record)
            files[record.file] = max(files.get(record.file, 0), record.end)
        else:
            unknown.add(record.key)
    faults = [f"chunks of an unknown tensor '{key}'" for key in sorted(unknown)]
    faults += [fault for key in infos for fault in _tiling_faults(key, infos[key], by_key[key])]
    faults += [fault for file in files for fault in _file_faults(folder / file, files[file])]
    if faults:
        raise ValueError(f"{folder} cannot become a checkpoint: {some(faults)}")
    _write(folder / _STATES, lambda file: torch.save([None], file))
    index = _index(infos, by_key, (folder / _STATES).stat().st_size)
    _write(folder / COMMON, lambda file: torch.save({**_COMMON, **(common or {})}, file))
    _write(folder / INDEX, lambda file: pickle.dump(index, file))
    _write(folder / CONFIG, lambda file: file.write(_config()))


def _tiling_faults(key: str, info: TensorInfo, records: list[ChunkRecord]) -> list[str]:
    dtype = str(info.dtype).removeprefix("torch.")
    wrong = sorted({record.dtype for record in records} - {dtype})
    if wrong:
        return [f"tensor '{key}' is {dtype} and has chunks of {', '.join(wrong)}"]
    try:
        Tiling(info.shape, [record.ranges for record in records])
    except ValueError as error:
        return [f"tensor '{key}': {error}"]
    return []


def _file_faults(path: Path, length: int) -> list[str]:
    if not path.is_file():
        return [f"{path.name} is missing"]
    size = path.stat().st_size
    return [f"{path.name} has {size} bytes of at least {length}"] if size < length else []


def _extra_states(infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Names of the transformer-engine states that a stock model wants to find.

    Every linear layer, norm and core attention of a model may have one, for FP8 training, and
    loading fails where one is missing; which of them do depends on the version. The state of a
    model that never trained in FP8 is None. A name tells the module, and its place among the
    layers and experts: ``.../shard_LAYER.EXPERT_LAYERS.EXPERTS``.
    """
    names: dict[str, None] = {}
    for key, info in infos.items():
        module = key.rpartition(".")[0]
        # Only what is stacked over layers or experts has these axes in front of its own.
        layers = re.match(r"decoder\.layers\.(?!\d)", key) is not None
        grid = info.shape[: layers + (".experts.experts." in key)] or (1,)
        for stateful in _stateful(module):
            for place in product(*map(range, grid)):
                shard = f"{'.'.join(map(str, place))}_{'.'.join(map(str, grid))}"
                names[f"{stateful}._extra_state/shard_{shard}"] = None
    yield from names


def _stateful(module: str) -> list[str]:
    """The module itself where it has an extra state, and a neighbour that has one and no tensor."""
    parent, _, name = module.rpartition(".")
    if not module.startswith(("decoder.", "mtp.")):
        return []
    if name == "linear_proj":
        return [module, f"{parent}.core_attention"]
    return [module] if name.startswith("linear_") or name.endswith("norm") else []


def _index(
    infos: Mapping[str, TensorInfo],
    by_key: Mapping[str, list[ChunkRecord]],
    states_length: int,
) -> Metadata:
    """The metadata as torch's FileSystemReader unpickles it."""
    tensors: dict[str, Any] = {}
    places = {}
    for state in _extra_states(infos):  # one None serves all
        tensors[state] = BytesStorageMetadata()
        places[MetadataIndex(state)] = _StorageInfo(_STATES, 0, states_length)
    for key, info in infos.items():
        chunks = []
        for number, record in enumerate(by_key[key]):
            offsets = torch.Size(record.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(record.sizes)))
            places[MetadataIndex(key, offsets, number)] = _StorageInfo(
                record.file, record.start, record.length
            )
        properties = TensorProperties(dtype=info.dtype)
        tensors[key] = TensorStorageMetadata(properties, torch.Size(info.shape), chunks)
    return Metadata(
        tensors,
        planner_data={},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def _config() -> bytes:
    """metadata.json as Megatron writes it."""
    return json.dumps(
        {
            "sharded_backend": BACKEND,
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
    ).encode()


def _write(path: Path, fill: Callable[[Any], Any]) -> None:
    """Write a file aside, bring it onto the disk, then give it its name."""
    aside = path.with_name(f"{path.name}.part")
    try:
        with open(aside, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
