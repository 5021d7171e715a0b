"""Brings what is read from mapped files into memory by one call instead of page by page.

A page fault costs more than copying the page, several times more in a virtual machine. A file that
was cut off while it is mapped becomes an error, where a plain access would kill the process.
"""

import ctypes
import errno
import mmap
from collections.abc import Mapping

from torch import Tensor

from megatron_bridge.source import Ranges, Source, TensorInfo

_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefetched:
    """A source whose rectangles are in memory when `read` returns them.

    Args:
        source: gives views of mapped files.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def tensors(self) -> Mapping[str, TensorInfo]:
        """As the source."""
        return self._source.tensors()

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """As the source.

        Raises:
            ValueError: when the file lost these bytes.
        """
        tensor = self._source.read(name, ranges)
        if not prefetch(tensor):
            raise lost(name)
        return tensor


def lost(name: str) -> ValueError:
    """Says that a tensor's file has no longer the bytes that it had."""
    return ValueError(
        f"'{name}' cannot be read: its file became shorter meanwhile, or the disk fails"
    )


def prefetch(tensor: Tensor) -> bool:
    """Bring a tensor's memory in; does nothing for one with gaps, or on an older Linux.

    Returns:
        False when the memory is that of a mapped file and the file has no such bytes.
    """
    if not tensor.numel() or not tensor.is_contiguous():
        return True
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    stop = tensor.data_ptr() + tensor.nbytes
    if _libc.madvise(start, stop - start, _POPULATE_READ) == 0:
        return True
    return ctypes.get_errno() != errno.EFAULT
