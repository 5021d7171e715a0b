"""Writes a HuggingFace folder in any order and from many processes, holding nothing in memory.

The headers come first: they say where every tensor will lie. From then on any process that opens
the folder writes any rectangle to its place. ``finish`` adds what makes it a model.
"""

import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.huggingface.folder import CONFIG, INDEX
from megatron_bridge.huggingface.safetensors_file import (
    DTYPE_NAMES,
    METADATA,
    SafetensorsFile,
    inside,
    listed,
)
from megatron_bridge.huggingface.shards import file_names, files_of, plan_shards, write_header
from megatron_bridge.huggingface.transpose import in_order
from megatron_bridge.page_cache import WriteBack, write_all
from megatron_bridge.source import Ranges, TensorInfo

SHARD_BYTES = 5 * 10**9

# What belongs to a model besides its weights; code (*.py) is not copied.
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
    "LICENSE*",
)
# A rectangle that does not lie in one piece is put in order in pieces of this size.
_PIECE_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class SafetensorsFolder:
    """A folder of safetensors files whose headers are written and whose tensors are to come.

    Processes share it by its path: one calls ``create``, all others ``SafetensorsFolder(path)``.
    Rectangles may be written in any order and again; nobody notices one that never comes, so the
    writers keep count.

    Raises:
        ValueError: when the folder's files are not all there, as after a ``create`` cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            files = [SafetensorsFile(file) for file in files_of(self.path)]
        except OSError as error:
            raise _explained(error, self.path, None) from error
        self._file_of = {name: file for file in files for name in file.infos}
        self._open: dict[Path, tuple[int, WriteBack]] = {}
        self._opening = threading.Lock()

    @classmethod
    def create(
        cls,
        path: str | Path,
        tensors: Mapping[str, TensorInfo],
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> "SafetensorsFolder":
        """Write the headers into ``path``, replacing weight files that are there.

        Args:
            path: the folder; it is made when absent.
            tensors: what will be written, in order.
            shard_bytes: most bytes of tensors in a file (but one tensor is never cut).

        Raises:
            ValueError: when the disk has too little space, the folder cannot be written or a
                dtype has no name in the format; in the first and last case nothing is written.
        """
        path = Path(path)
        shards = plan_shards(tensors, shard_bytes)
        _check_dtypes(tensors)
        try:
            path.mkdir(parents=True, exist_ok=True)
            _check_space(path, sum(info.bytes for info in tensors.values()))
            for file in path.glob("model*.safetensors"):
                file.unlink()
            for name, shard in zip(file_names(len(shards)), shards, strict=True):
                write_header(path / name, shard)
        except OSError as error:
            raise _explained(error, path, None) from error
        return cls(path)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the headers, file by file."""
        return {name: file.infos[name] for name, file in self._file_of.items()}

    def write(self, name: str, ranges: Ranges, tensor: Tensor) -> None:
        """Write the rectangle ``ranges`` of a tensor; whole rows are fastest.

        Raises:
            ValueError: when the disk is full or the file cannot be written.
        """
        file = self._file_of[name]
        info = file.infos[name]
        shape = tuple(last - first for first, last in ranges)
        given = (tensor.dtype, tuple(tensor.shape))
        assert given == (info.dtype, shape), f"'{name}' {ranges} is {info.dtype}, not {given}"
        assert inside(info.shape, ranges), f"{ranges} is not inside '{name}' of {info.shape}"
        at = file.offset(name)
        for offset, data in _runs(info, ranges, tensor):
            self._put(file.path, at + offset, data)

    def flush(self) -> None:
        """Return once all that this process wrote is on the disk; its files are closed.

        Raises:
            ValueError: when the disk failed or was full.
        """
        with self._opening:
            for path, (descriptor, _) in self._open.items():
                try:
                    os.fsync(descriptor)
                except OSError as error:
                    raise _explained(error, path, None) from error
                finally:
                    os.close(descriptor)
            self._open.clear()

    def finish(self, config: Mapping[str, Any], others: str | Path | None = None) -> None:
        """Once everybody has flushed: write index and config, copy the model's other files.

        Args:
            config: the content of config.json.
            others: the folder whose tokenizer, generation, chat and licence files go along.

        Raises:
            ValueError: when the disk is full or a file cannot be read or written.
        """
        self.flush()
        try:
            files = {file.path.name for file in self._file_of.values()}
            if len(files) > 1:
                _write_json(self.path / INDEX, self._index())
            _write_json(self.path / CONFIG, config)
            if others is not None:
                copy_others(Path(others), self.path)
        except OSError as error:
            raise _explained(error, self.path, None) from error

    def _index(self) -> dict[str, Any]:
        return {
            "metadata": {"total_size": sum(info.bytes for info in self.tensors().values())},
            "weight_map": {name: file.path.name for name, file in self._file_of.items()},
        }

    def _put(self, path: Path, offset: int, data: memoryview) -> None:
        try:
            with self._opening:
                if path not in self._open:
                    opened = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                    self._open[path] = opened, WriteBack(opened)
                descriptor, write_back = self._open[path]
            write_all(lambda part, at: os.pwrite(descriptor, part, offset + at), data)
            write_back.wrote(offset, len(data))
        except OSError as error:
            raise _explained(error, path, len(data)) from error


def copy_others(source: Path, folder: Path) -> None:
    """Copy what belongs to a model besides weights and config. Code is left behind."""
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_file() and path.suffix != ".py":
                shutil.copyfile(path, folder / path.name)
    templates = source / "chat_templates"
    if templates.is_dir():
        ignored = shutil.ignore_patterns("*.py")
        shutil.copytree(templates, folder / templates.name, ignore=ignored, dirs_exist_ok=True)


def _runs(info: TensorInfo, ranges: Ranges, tensor: Tensor) -> Iterator[tuple[int, memoryview]]:
    """The rectangle as runs of bytes that lie in one piece, each with its offset in the tensor."""
    if not tensor.numel():
        return
    if not info.shape:
        yield 0, _bytes(tensor)
        return
    # All dimensions behind `outer` are whole: the rectangle is in one piece from `outer` on.
    outer = len(ranges) - 1
    while outer and ranges[outer] == (0, info.shape[outer]):
        outer -= 1
    row_bytes = math.prod(info.shape[outer + 1 :]) * info.dtype.itemsize
    step = max(1, _PIECE_BYTES // row_bytes)
    first, last = ranges[outer]
    for index in _indices(tensor.shape[:outer]):
        row = 0
        for (begin, _), position, size in zip(ranges, index, info.shape, strict=False):
            row = row * size + begin + position
        row = row * info.shape[outer] + first
        part = tensor[index]
        most = last - first if part.is_contiguous() and part.device.type == "cpu" else step
        for begin in range(0, last - first, most):
            yield (row + begin) * row_bytes, _bytes(part[begin : begin + most])


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every index of a tensor, in order."""
    for number in range(math.prod(shape)):
        index = []
        for size in reversed(shape):
            number, position = divmod(number, size)
            index.append(position)
        yield tuple(reversed(index))


def _bytes(tensor: Tensor) -> memoryview:
    data = in_order(tensor.detach().cpu()).view(-1).view(torch.uint8)
    return memoryview(data.numpy())  # type: ignore[arg-type]


def _check_dtypes(tensors: Mapping[str, TensorInfo]) -> None:
    if METADATA in tensors:
        raise ValueError(f"safetensors cannot hold a tensor named '{METADATA}'; rename it")
    bad = [f"'{n}' ({i.dtype})" for n, i in tensors.items() if i.dtype not in DTYPE_NAMES]
    if bad:
        raise ValueError(f"safetensors has no such dtypes: {listed(bad, ', ')}")


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise Unwritable(
            f"{folder} needs {needed} bytes ({needed / 1e9:.1f} GB) and the disk has {free} free "
            f"({free / 1e9:.1f} GB); make room or choose another place"
        )


class Unwritable(OSError, ValueError):
    """The system does not write: the disk is full, say. Its text tells where and why."""


def _explained(error: OSError, path: Path, needed: int | None) -> Unwritable:
    """One line for what the system reports as a number."""
    if isinstance(error, Unwritable):
        return error
    where = Path(error.filename) if error.filename else path
    if error.errno in _FULL:
        what = f"; {needed} bytes more are needed there" if needed else ""
        return Unwritable(f"the disk is full, {where} cannot be written{what}; make room")
    if error.errno in _DENIED:
        return Unwritable(f"no permission to write {where}")
    return Unwritable(f"{where} cannot be written: {error.strerror or error}")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
