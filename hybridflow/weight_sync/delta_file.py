"""Reading and writing of whole pieces of files: the system may do less than asked at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_at(file: BinaryIO, at: int, into: np.ndarray) -> None:
    """Fill ``into`` (bytes) from ``at`` on. EOFError when the file ends before."""
    view = into.data
    while view:
        count = os.preadv(file.fileno(), [view], at)
        if not count:
            raise EOFError(f"it ends at byte {at}, {len(view)} bytes early")
        view, at = view[count:], at + count


def write_at(file: BinaryIO, at: int, data: np.ndarray) -> None:
    """Write all of ``data`` (bytes) from ``at`` on."""
    view = data.data
    while view:
        count = os.pwrite(file.fileno(), view, at)
        view, at = view[count:], at + count


def append(file: BinaryIO, data: bytes) -> None:
    """Write all of ``data`` at the file's own place."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def write_durably(path: Path, text: str) -> None:
    """A small file that is on the disk when this returns."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def needing_space(folder: Path, what: str) -> Iterator[None]:
    """ValueError that names ``folder`` when it has no room for ``what``."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL_DISK:
            raise
        raise ValueError(
            f"{folder}: no space for {what} ({error}). Free some, or set another "
            "roles.rollout.sync.directory."
        ) from error
