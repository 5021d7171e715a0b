"""Writes that pass through the page cache, and have the disk begin while more is still to come.

Left to itself the kernel keeps what is written in memory until somebody asks for it to be on the
disk, and then the disk works while the processors wait.
"""

import ctypes
from collections.abc import Callable

_MOST_BYTES = 128 << 10
"""Of one write(): for larger ones the kernel looks for large pages, longer than it copies."""
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None)
_OFF = ctypes.c_int64


def write_all(write: Callable[[memoryview, int], int], data: memoryview) -> None:
    """Write every byte.

    Args:
        write: is given a part of the data and its position in it; returns how many bytes it took.
        data: bytes.
    """
    done = 0
    while done < len(data):
        done += write(data[done : done + _MOST_BYTES], done)


def begin_write_back(descriptor: int, offset: int, length: int) -> None:
    """Have the disk begin with these bytes of a file; does not wait for it.

    It is no more than a hint, which a system may not know. A disk that fails says so to `fsync`.
    """
    if hasattr(_libc, "sync_file_range"):
        _libc.sync_file_range(descriptor, _OFF(offset), _OFF(length), _SYNC_FILE_RANGE_WRITE)
