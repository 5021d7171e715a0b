"""A file of chunks, appended one after another, and the record of each."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

import torch
from torch import Tensor
from torch.utils.serialization import config

from megatron_bridge.page_cache import WriteBack, write_all
from megatron_bridge.source import Ranges

# Megatron gives the files of a checkpoint this ending, and its tools look for it.
SUFFIX = ".distcp"
# Torch aligns data to this inside an archive; aligned archives make aligned data.
_ALIGNMENT = 64


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
        self._write_back = WriteBack(self._file.fileno())

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
            # them makes writing half as fast.
            with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                _save(_own_storage(tensor), self._file)
        except BaseException:
            self._file.truncate(before)
            self._file.seek(before)
            raise
        end = self._file.tell()
        self._write_back.wrote(before, end - before)
        length = end - start
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
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            write_all(lambda part, _: self._file.write(part), view)
        except OSError as error:
            self.error = self.error or error
            raise
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""


def _save(tensor: Tensor, file: Any) -> None:
    """torch.save, with the error that the file gave: torch's own hides a full disk."""
    target = _Whole(file)
    try:
        torch.save(tensor, cast(IO[bytes], target))
    except RuntimeError:
        if target.error is None:
            raise
        raise target.error from None


def _own_storage(tensor: Tensor) -> Tensor:
    """The same numbers, alone in their storage: torch.save writes the storage, not the view."""
    plain = tensor.detach().cpu().contiguous()
    if plain.untyped_storage().nbytes() == plain.nbytes:
        return plain
    # A storage of its own over the same memory, so that nothing is copied.
    alone = torch.from_numpy(plain.view(-1).view(torch.uint8).numpy())
    return alone.view(plain.dtype).view(plain.shape)
