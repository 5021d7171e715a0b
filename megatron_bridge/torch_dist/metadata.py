"""What a checkpoint holds and where: ``metadata.json`` and ``.metadata``, checked."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import torch

from megatron_bridge.source import Ranges, TensorInfo
from megatron_bridge.torch_dist import pickles
from megatron_bridge.torch_dist.pickles import Record

CONFIG = "metadata.json"
INDEX = ".metadata"
COMMON = "common.pt"
BACKEND = "torch_dist"
# Torch's own limit on a tensor's dimensions.
_MOST_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a file of the checkpoint."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rectangle of a tensor that lies in one place."""

    ranges: Ranges
    place: Place


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor and its chunks."""

    info: TensorInfo
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """Everything that a checkpoint holds, by name, in the file's order."""

    tensors: dict[str, Stored]
    objects: dict[str, Place]


def is_torch_dist(folder: Path) -> bool:
    """Whether the folder says that it is a torch_dist checkpoint.

    Raises:
        ValueError: when it is a distributed checkpoint of another kind, or its metadata.json is
            damaged.
    """
    path = folder / CONFIG
    if not path.is_file():
        return False
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}); copy the checkpoint again") from error
    if not isinstance(config, dict) or "sharded_backend" not in config:
        return False
    kind = (config["sharded_backend"], config.get("sharded_backend_version", 1))
    if kind != (BACKEND, 1):
        raise ValueError(
            f"{folder} is a Megatron checkpoint of kind {kind[0]} version {kind[1]}, and "
            f"{BACKEND} version 1 can be read; save it again with --dist-ckpt-format {BACKEND}"
        )
    return True


def read_index(folder: Path) -> Index:
    """The checkpoint's metadata.

    Raises:
        ValueError: when the folder is no checkpoint, its metadata is damaged or refused, or its
            files are missing, shorter than the metadata says, or outside the folder.
    """
    if not is_torch_dist(folder):
        raise ValueError(f"{folder} is not a Megatron {BACKEND} checkpoint: it has no {CONFIG}")
    index = _Reading(folder / INDEX).index()
    _check_apart(folder, index)
    _check_files(folder, _places(index))
    return index


class _Reading:
    """Turns the records of ``.metadata`` into an Index, trusting none of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        fields = pickles.load(path).fields()
        self._entries = self._dict(fields.get("state_dict_metadata"), "tensors")
        stored = self._dict(fields.get("storage_data"), "places")
        self._places = {self._key(key): value for key, value in stored.items()}

    def index(self) -> Index:
        tensors: dict[str, Stored] = {}
        objects: dict[str, Place] = {}
        for name, entry in self._entries.items():
            if not isinstance(name, str):
                raise self._damaged(f"the name {name!r} is not text")
            if isinstance(entry, Record) and entry.kind == "BytesStorageMetadata":
                objects[name] = self._place(name, None)
            else:
                tensors[name] = self._tensor(name, entry)
        return Index(tensors, objects)

    def _tensor(self, name: str, entry: Any) -> Stored:
        fields = self._fields(entry, "TensorStorageMetadata", name)
        shape = self._sizes(fields.get("size"), name)
        info = TensorInfo(self._dtype(fields.get("properties"), name), shape)
        chunks = fields.get("chunks")
        if not isinstance(chunks, list):
            raise self._damaged(f"'{name}' has no list of chunks")
        return Stored(info, tuple(self._chunk(name, len(shape), chunk) for chunk in chunks))

    def _chunk(self, name: str, dimensions: int, chunk: Any) -> Chunk:
        fields = self._fields(chunk, "ChunkStorageMetadata", name)
        offsets = self._sizes(fields.get("offsets"), name)
        sizes = self._sizes(fields.get("sizes"), name)
        if len(offsets) != dimensions or len(sizes) != dimensions:
            raise self._damaged(f"a chunk of '{name}' has not {dimensions} dimensions")
        ranges = tuple((a, a + n) for a, n in zip(offsets, sizes, strict=True))
        return Chunk(ranges, self._place(name, offsets))

    def _dtype(self, properties: Any, name: str) -> torch.dtype:
        state = properties.state if isinstance(properties, Record) else None
        dtype = state.get("dtype") if isinstance(state, dict) else state and state[0]
        if not isinstance(dtype, torch.dtype):
            raise self._damaged(f"'{name}' has no dtype")
        return dtype

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> Place:
        what = f"'{name}'" if offsets is None else f"the chunk of '{name}' at {list(offsets)}"
        if (name, offsets) not in self._places:
            raise self._damaged(f"{what} has no place in a file")
        fields = self._fields(self._places[name, offsets], "_StorageInfo", name)
        file, start, length = (fields.get(f) for f in ("relative_path", "offset", "length"))
        if not (isinstance(file, str) and _counts(start) and _counts(length)):
            raise self._damaged(f"the place of {what} is not a file, a start and a length")
        if Path(file).name != file or file in (".", "..") or "\0" in file:
            raise ValueError(
                f"{self._path} is refused: it places {what} in '{file}', which is not a file of "
                "this folder"
            )
        if fields.get("transform_descriptors"):
            raise ValueError(
                f"{self._path}: {what} is stored transformed "
                f"({fields['transform_descriptors']}); save the checkpoint without transforms"
            )
        return Place(file, start, length)

    def _key(self, key: Any) -> tuple[str, tuple[int, ...] | None]:
        """A MetadataIndex as (name, offsets)."""
        fields = self._fields(key, "MetadataIndex", "a place")
        name, offsets = fields.get("fqn"), fields.get("offset")
        if not isinstance(name, str):
            raise self._damaged("a place has no name")
        return name, None if offsets is None else self._sizes(offsets, name)

    def _sizes(self, value: Any, name: str) -> tuple[int, ...]:
        right = isinstance(value, tuple | list) and len(value) <= _MOST_DIMENSIONS
        if not right or not all(_counts(size) for size in value):
            raise self._damaged(f"'{name}' has sizes that are not natural numbers")
        return tuple(value)

    def _fields(self, value: Any, kind: str, name: str) -> dict[Any, Any]:
        if not isinstance(value, Record) or value.kind != kind:
            raise self._damaged(f"'{name}' is not described by a {kind}")
        return value.fields()

    def _dict(self, value: Any, what: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise self._damaged(f"it lists no {what}")
        return value

    def _damaged(self, why: str) -> ValueError:
        return ValueError(f"{self._path} is damaged: {why}; copy the checkpoint again")


def _counts(value: Any) -> TypeGuard[int]:
    """Whether it is a natural number that a file offset can be."""
    return type(value) is int and 0 <= value < 2**63


def _places(index: Index) -> Iterable[Place]:
    for stored in index.tensors.values():
        yield from (chunk.place for chunk in stored.chunks)
    yield from index.objects.values()


def _check_apart(folder: Path, index: Index) -> None:
    """No two chunks lie in the same bytes: else one of them would be read as the other."""
    chunks = [
        (chunk.place.file, chunk.place.start, chunk.place.length, name)
        for name, stored in index.tensors.items()
        for chunk in stored.chunks
    ]
    chunks.sort()
    faults = [
        f"chunks of '{name}' and '{other}' lie in the same bytes of {file}"
        for (file, start, length, name), (next_file, next_start, _, other) in pairwise(chunks)
        if file == next_file and next_start < start + length
    ]
    if faults:
        raise ValueError(f"{folder / INDEX} is damaged: {some(faults)}; copy the checkpoint again")


def _check_files(folder: Path, places: Iterable[Place]) -> None:
    """Every file is there, and as long as its last chunk needs."""
    needed: dict[str, int] = {}
    for place in places:
        needed[place.file] = max(needed.get(place.file, 0), place.start + place.length)
    faults = []
    for file, length in sorted(needed.items()):
        path = folder / file
        if not path.is_file():
            faults.append(f"{file} is missing")
        elif path.stat().st_size < length:
            faults.append(f"{file} has {path.stat().st_size} bytes of at least {length}")
    if faults:
        raise ValueError(f"{folder} is incomplete, copy it again: {some(faults)}")


def some(things: list[str], limit: int = 5) -> str:
    """The first few of a list of faults, and how many more there are."""
    shown = "; ".join(things[:limit])
    return shown if len(things) <= limit else f"{shown}; and {len(things) - limit} more"
