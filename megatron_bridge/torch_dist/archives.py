"""Where the numbers of a chunk lie: reads the frame of what ``torch.save`` wrote, not the data."""

import io
import mmap
import pickle
import re
import zipfile
from dataclasses import dataclass, replace
from typing import IO, cast

import torch
from torch import Tensor

_MAGIC = b"PK\x03\x04"
_MOST_KNOWN = 64
_MOST_FRAME = 16 << 10
"""Bytes of an archive beside its data that are worth keeping; torch writes about 1,500."""
# What a damaged or refused archive makes torch.load and zipfile raise.
DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)


@dataclass(frozen=True, slots=True)
class Data:
    """A strided tensor over bytes of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    offset: int  # of the first element from the storage's start, in elements
    start: int  # of the storage, in bytes from the beginning of the file
    bytes: int  # of the storage

    def view(self, file: mmap.mmap) -> Tensor:
        """The tensor as a view of the mapped file; it keeps the map alive."""
        if self.bytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        # Starting at the data, because a view of wider elements may not start anywhere else; the
        # archives of one file follow each other without alignment.
        flat = torch.frombuffer(file, dtype=torch.uint8, count=self.bytes, offset=self.start)
        return flat.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class _Known:
    """An archive that was looked at: its bytes before and behind the data, and where the data is.

    Attributes:
        data: as if the archive began at byte 0.
    """

    head: bytes
    tail: bytes
    data: Data


class Locator:
    """Finds the tensors that ``torch.save`` wrote into files.

    A checkpoint has thousands of archives that differ in nothing but their numbers. Where such an
    archive's bytes outside the data are those of one that it knows, it need not be looked at again.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by length

    def locate(self, file: mmap.mmap, start: int, length: int) -> Data:
        """Find the tensor at these bytes of a file.

        Raises:
            ValueError: when the bytes are no such archive, are damaged, or hold anything else than
                one plain tensor.
        """
        known = self._known.get(length)
        if known is None or file[start : start + len(known.head)] != known.head:
            return self._look(file, start, length)
        data = replace(known.data, start=start + known.data.start)
        # Checksums of the data, which not every writer notes, make the tails differ.
        if file[start + length - len(known.tail) : start + length] != known.tail:
            _check_record(_Window(file, start, length), known.data.start, data.bytes)
        return data

    def _look(self, file: mmap.mmap, start: int, length: int) -> Data:
        data = _look(_Window(file, start, length))
        if len(self._known) == _MOST_KNOWN:
            self._known.clear()
        end = data.start + data.bytes
        head, tail = file[start : start + data.start], file[start + end : start + length]
        if data.bytes and len(head) + len(tail) < _MOST_FRAME:
            self._known[length] = _Known(head, tail, data)
        return replace(data, start=start + data.start)


def _look(window: "_Window") -> Data:
    """Where an archive's data is, as if the archive began at byte 0."""
    tensor = _frame(window)
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    # For a tensor without data, torch notes here where in its archive the data would be.
    inside: int = storage._checkpoint_offset  # type: ignore[attr-defined]
    if size:
        _check_record(window, inside, size)
    _check_extent(tensor, size)
    shape, stride = tuple(tensor.shape), tensor.stride()
    return Data(tensor.dtype, shape, stride, int(tensor.storage_offset()), inside, size)


def _frame(window: "_Window") -> Tensor:
    """The archive's tensor, without its data."""
    if window.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("these bytes do not begin as torch.save begins")
    window.seek(0)
    try:
        tensor = torch.load(cast(IO[bytes], window), map_location="meta", weights_only=True)
    except DAMAGE as error:
        raise ValueError(f"refused or damaged: {reason(error)}") from error
    plain = type(tensor) is Tensor and tensor.is_meta and tensor.layout == torch.strided
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"holds a {type(tensor).__name__}, not a plain tensor")
    return tensor


def reason(error: BaseException) -> str:
    """What torch.load says against a file, without its advice on how to trust it."""
    text = str(error) or type(error).__name__
    if named := re.search(r"GLOBAL ([\w.]+)", text):
        return f"it names {named[1]}, which is no plain data and could run code"
    if said := re.search(r"WeightsUnpickler error: (.+)", text):
        return said[1]
    return text.splitlines()[0]


def _check_record(window: "_Window", start: int, size: int) -> None:
    """The data is one record of the archive, whole and not compressed."""
    try:
        with zipfile.ZipFile(window) as archive:
            entries = [entry for entry in archive.infolist() if entry.header_offset < start]
    except DAMAGE as error:
        raise ValueError(f"damaged: {error}") from error
    record = max(entries, key=lambda entry: entry.header_offset, default=None)
    if record is None or record.file_size < size or start + size > window.length:
        raise ValueError("damaged: the archive is shorter than its tensor")
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError("the data is compressed; torch.save does not write it so")


def _check_extent(tensor: Tensor, size: int) -> None:
    """Shape and strides stay inside the storage."""
    if tensor.numel() == 0:
        return
    last = tensor.storage_offset() + sum(
        (length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if min(tensor.stride(), default=0) < 0 or (last + 1) * tensor.itemsize > size:
        raise ValueError("damaged: the tensor reaches beyond its data")


class _Window(io.RawIOBase):
    """Bytes of a mapped file as a file of their own."""

    def __init__(self, file: mmap.mmap, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self.length = file, start, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError("cannot seek before the archive")
        self._position = base + offset
        return self._position

    def readinto(self, buffer, /) -> int:  # type: ignore[no-untyped-def]
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self.length - self._position))
        at = self._start + self._position
        target[:count] = memoryview(self._file)[at : at + count]
        self._position += count
        return count
