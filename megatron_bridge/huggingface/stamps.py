"""Notices that a file changed since it was opened."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megatron_bridge.huggingface.safetensors_file import listed


class _Stamp(NamedTuple):
    size: int
    mtime_ns: int
    inode: int


class Stamps:
    """Size, time of change and inode of some files, as they were when this was made.

    Raises:
        OSError: when a file cannot be looked up.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._noted = {file: _stamp(file) for file in files}

    def check(self) -> None:
        """Make sure that all files are as they were.

        Raises:
            ValueError: naming those that changed.
        """
        changed = [str(file) for file, noted in self._noted.items() if not _is(file, noted)]
        if changed:
            raise ValueError(
                f"changed while being read: {listed(changed, ', ')}; wait until nothing writes "
                "there and start again"
            )


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return _Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


def _is(path: Path, noted: _Stamp) -> bool:
    try:
        return _stamp(path) == noted
    except OSError:  # gone, or closed to us: changed
        return False
