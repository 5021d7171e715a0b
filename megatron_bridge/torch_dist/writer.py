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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils.serialization import config

from megatron_bridge.source import Ranges, TensorInfo
from megatron_bridge.torch_dist.metadata import BACKEND, COMMON, CONFIG, INDEX, some
from megatron_bridge.torch_dist.tiling import Tiling

# Megatron gives the files of a checkpoint this ending, and its tools look for it.
SUFFIX = ".distcp"
# Torch aligns data to this inside an archive; aligned archives make aligned data.
_ALIGNMENT = 64
# One write() of Linux transfers at most about 2 GiB.
_MOST_BYTES = 1 << 30
# What Megatron-LM looks for in common.pt. The iteration of a release is 0.
_COMMON = {"checkpoint_version": 3.0, "iteration": 0}


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk that is in a file: which rectangle of which tensor, and where."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str  # as torch prints it, without "torch."
    file: str  # in the checkpoint's folder
    start: int
    length: int

    @property
    def ranges(self) -> Ranges:
        """The rectangle."""
        return tuple((a, a + n) for a, n in zip(self.offsets, self.sizes, strict=True))

    @property
    def end(self) -> int:
        """The position behind the chunk: where a file that ends with it is opened again."""
        return self.start + self.length

    def to_json(self) -> dict[str, Any]:
        """The record as JSON holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The inverse of ``to_json``, also after JSON has made lists of the tuples."""
        return cls(
            **{
                **fields,
                "offsets": tuple(fields["offsets"]),
                "sizes": tuple(fields["sizes"]),
            }
        )


class ChunkFile:
    """A file of chunks, open for appending.

    Args:
        path: named ``*.distcp``, in the checkpoint's folder.
        position: where to go on: 0 for a new file, ``ChunkRecord.end`` of the last chunk to keep
            for one that was cut off. What lies behind is dropped.

    Raises:
        ValueError: when the file is shorter than ``position``.
    """

    def __init__(self, path: str | Path, position: int = 0) -> None:
        self.path = Path(path)
        if self.path.suffix != SUFFIX:
            raise ValueError(f"{path} must end in {SUFFIX}, or Megatron does not know the file")
        # Unbuffered: the data goes from the tensor to the page cache without a copy between.
        self._file = open(self.path, "r+b" if position else "w+b", buffering=0)  # noqa: SIM115
        length = self._file.seek(0, os.SEEK_END)
        if length < position:
            self._file.close()
            raise ValueError(
                f"{path} has {length} bytes where {position} were recorded as written: the "
                "interrupted work cannot be resumed; start over"
            )
        self._file.truncate(position)
        self._file.seek(position)

    def add(self, key: str, offsets: Sequence[int], tensor: Tensor) -> ChunkRecord:
        """Append the chunk of tensor ``key`` that begins at ``offsets``.

        Copies the chunk only when it is not contiguous or not on the CPU. When it fails, as on a
        full disk, the file is cut back to the chunks before.

        Raises:
            OSError: when the chunk cannot be written.
        """
        before = self._file.tell()
        start = -(-before // _ALIGNMENT) * _ALIGNMENT
        try:
            self._file.truncate(start)
            self._file.seek(start)
            # Nothing reads the checksums of torch's archives (torch.load does not), and computing
            # them takes longer than writing does.
            with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                torch.save(_own_storage(tensor), cast(IO[bytes], _Whole(self._file)))
        except BaseException:
            self._file.truncate(before)
            self._file.seek(before)
            raise
        length = self._file.tell() - start
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        return ChunkRecord(key, tuple(offsets), shape, dtype, self.path.name, start, length)

    def sync(self) -> None:
        """Bring all chunks so far onto the disk: before this their records prove nothing."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Bring all chunks onto the disk and close the file."""
        if not self._file.closed:
            self.sync()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Whole:
    """What torch.save writes into: an unbuffered file whose writes are never partial."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += self._file.write(view[done : done + _MOST_BYTES])
        return done

    def flush(self) -> None:
        """Nothing is held back."""


def _own_storage(tensor: Tensor) -> Tensor:
    """The same numbers, alone in their storage: torch.save writes the storage, not the view."""
    plain = tensor.detach().cpu().contiguous()
    if plain.untyped_storage().nbytes() == plain.nbytes:
        return plain
    # A storage of its own over the same memory, so that nothing is copied.
    alone = torch.from_numpy(plain.view(-1).view(torch.uint8).numpy())
    return alone.view(plain.dtype).view(plain.shape)


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
    _write(folder / COMMON, lambda file: torch.save({**_COMMON, **(common or {})}, file))
    _write(folder / INDEX, lambda file: pickle.dump(_index(infos, by_key), file))
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


def _index(infos: Mapping[str, TensorInfo], by_key: Mapping[str, list[ChunkRecord]]) -> Metadata:
    """The metadata as torch's FileSystemReader unpickles it."""
    tensors: dict[str, Any] = {}
    places = {}
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


def _write(path: Path, fill: Any) -> None:
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
