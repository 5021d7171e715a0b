"""Writes that pass through the page cache, and have the disk begin while more is still to come.

Left to itself the kernel keeps what is written in memory until somebody asks for it to be on the
disk, and then the disk works while the processors wait.
"""

import ctypes
from collections.abc import Callable

_MOST_BYTES = 128 << 10
"""Of one write(): for larger ones the kernel looks for large pages, longer than it copies."""
_SYNC_FILE_RANGE_WRITE = 2
_SPAN_BYTES = 8 << 20
"""Of one request to the disk: enough to be worth a request, a small part of what is written."""
_libc = ctypes.CDLL(None)


def write_all(write: Callable[[memoryview, int], int], data: memoryview) -> None:
    """Write every byte.

    Args:
        write: is given a part of the data and its position in it; returns how many bytes it took.
        data: bytes.
    """
    done = 0
    while done < len(data):
        done += write(data[done : done + _MOST_BYTES], done)


class WriteBack:
    """Has the disk begin with what was written into a file, some MiB at a time.

    It is no more than a hint, which a system may not know. A disk that fails says so to `fsync`.

    Args:
        descriptor: of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start = self._stop = 0

    def wrote(self, offset: int, length: int) -> None:
        """Tell that these bytes were written."""
        if offset != self._stop:
            self._begin()
            self._start = offset
        self._stop = offset + length
        if self._stop - self._start >= _SPAN_BYTES:
            self._begin()

    def _begin(self) -> None:
        """The last bytes written in a row; waits only where the disk's queue is full."""
        length = self._stop - self._start
        if length and hasattr(_libc, "sync_file_range"):
            place = (ctypes.c_int64(self._start), ctypes.c_int64(length))
            _libc.sync_file_range(self._descriptor, *place, _SYNC_FILE_RANGE_WRITE)
        self._start = self._stop
