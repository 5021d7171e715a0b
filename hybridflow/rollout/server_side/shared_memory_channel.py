"""The receiving end of a stream of buckets through one mapped file; see `weight_sync.areas`.

The file holds a page of numbers, 64-bit little-endian, then two areas. The sender fills area
`number % 2` and counts `sent` up; this side copies it out and counts `released` up. So one bucket
is filled while the other is copied, and no third exists. Either side says when it starts and stops,
and holds a lock on a byte of its own meanwhile: the system drops it when the process dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __package__:
    from hybridflow.rollout.server_side.sync_files import LoadFault, open_inside
else:  # inside SGLang, this folder is on the path and the project is not
    from sync_files import LoadFault, open_inside

HEADER = 4096
SENT, RELEASED = 0, 64
SENDER_STARTED, SENDER_STOPPED = 128, 192
RECEIVER_STARTED, RECEIVER_STOPPED = 256, 320
_FIRST_SLEEP, _LONGEST_SLEEP = 5e-5, 2e-3


class SharedMemoryChannel:
    """Receives the buckets of one stream in order; `seconds` bound each wait."""

    def __init__(self, descriptor: int, area: int, name: str, seconds: float) -> None:
        self._descriptor, self._area, self._name, self._seconds = descriptor, area, name, seconds
        _lock(descriptor, RECEIVER_STARTED)
        self._write(RECEIVER_STARTED, 1)
        size = os.fstat(descriptor).st_size
        self._map: Tensor | None = torch.frombuffer(
            mmap.mmap(descriptor, size), dtype=torch.uint8, offset=HEADER
        )

    def receive(self, number: int, count: int) -> Tensor:
        """Bucket `number`, uint8 [count], valid until it is released.

        Raises:
            LoadFault: when it is over the area, or the sender stopped or did not fill it in time.
        """
        assert self._map is not None, f"stream {self._name} was closed"
        if count > self._area:
            raise LoadFault(
                f"bucket {number} of stream {self._name} has {count} bytes, its area {self._area}."
            )
        deadline, pause = time.monotonic() + self._seconds, _FIRST_SLEEP
        while self._number(SENT) <= number:
            self._check(number, deadline)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP)
        start = number % 2 * self._area
        return self._map[start : start + count]

    def _check(self, number: int, deadline: float) -> None:
        waited = f"bucket {number} of stream {self._name}"
        stopped, died = self._number(SENDER_STOPPED), self._sender_died()
        if (stopped or died) and self._number(SENT) <= number:
            why = "stopped" if stopped else "died"
            raise LoadFault(f"{waited} will not come: its sender {why}.")
        if time.monotonic() > deadline:
            raise LoadFault(
                f"{waited} did not come within {self._seconds:g} s; its sender has filled "
                f"{self._number(SENT)}."
            )

    def release(self, number: int) -> None:
        """The sender may fill this bucket's area again."""
        self._write(RELEASED, number + 1)

    def close(self) -> None:
        """Let the file go; a sender that still waits learns of it."""
        self._write(RECEIVER_STOPPED, 1)
        self._map = None
        os.close(self._descriptor)

    def _sender_died(self) -> bool:
        """Whether it started and its lock is free."""
        started = bool(self._number(SENDER_STARTED))
        return started and not _is_locked(self._descriptor, SENDER_STARTED)

    def _number(self, offset: int) -> int:
        return int.from_bytes(os.pread(self._descriptor, 8, offset), "little")

    def _write(self, offset: int, number: int) -> None:
        os.pwrite(self._descriptor, number.to_bytes(8, "little"), offset)


def open_channel(stream: dict[str, Any], folder: Path, seconds: float) -> SharedMemoryChannel:
    """The channel that a request's `stream` describes, in the sync folder."""
    area = stream["area"]
    descriptor = open_inside(folder, stream["file"], HEADER + 2 * area)
    return SharedMemoryChannel(descriptor, area, stream["name"], seconds)


def _lock(descriptor: int, byte: int) -> None:
    """Lock a byte for as long as the open file lives; no other process's doings touch that."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(byte))


def _is_locked(descriptor: int, byte: int) -> bool:
    """Whether another open file holds the byte's lock."""
    found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(byte))
    return struct.unpack_from("h", found)[0] != fcntl.F_UNLCK


def _flock(byte: int) -> bytes:
    """The system's `struct flock` of a write lock on one byte."""
    return struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
