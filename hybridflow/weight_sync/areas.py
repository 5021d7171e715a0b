"""The sending end of a stream of buckets through one mapped file.

The receiving end runs inside the rollout server (`shared_memory_channel`), which imports nothing of
this project: what the file holds is told there, and a test moves buckets from one to the other.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.weight_sync.slots import open_reserved, reserve_file

HEADER = 4096
SENT, RELEASED = 0, 64
SENDER_STARTED, SENDER_STOPPED = 128, 192
RECEIVER_STARTED, RECEIVER_STOPPED = 256, 320
_FIRST_SLEEP, _LONGEST_SLEEP = 5e-5, 2e-3


class StreamBroken(RuntimeError):
    """The other end stopped, or did not go on in time."""


def create_areas(path: Path, area: int) -> None:
    """Reserve a file of two areas of `area` bytes; ValueError when it exists or has no room."""
    reserve_file(path, HEADER + 2 * area, "a stream's two buckets")


def stop_areas(path: Path) -> None:
    """Tell a sender that still waits that nobody takes its buckets any more."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, (1).to_bytes(8, "little"), RECEIVER_STOPPED)
    finally:
        os.close(descriptor)


def reset_areas(path: Path, area: int) -> None:
    """Make ready for another stream; nobody may be using the file."""
    descriptor = open_reserved(path, HEADER + 2 * area)
    try:
        os.pwrite(descriptor, bytes(HEADER), 0)
    finally:
        os.close(descriptor)


class AreaSender:
    """Sends buckets in order. At most two exist: one that is filled, one that is taken out.

    `name` is the stream's in errors, `seconds` the deadline of each wait.
    """

    def __init__(self, path: Path, area: int, name: str, seconds: float) -> None:
        self._area, self._name, self._seconds = area, name, seconds
        self._descriptor = open_reserved(path, HEADER + 2 * area)
        _lock(self._descriptor, SENDER_STARTED)
        self._write(SENDER_STARTED, 1)
        mapped = mmap.mmap(self._descriptor, HEADER + 2 * area)
        self._map: Tensor | None = torch.frombuffer(mapped, dtype=torch.uint8, offset=HEADER)

    def area(self, number: int) -> Tensor:
        """Where bucket `number` goes, uint8; waits until the receiver took out what was there.

        Raises:
            StreamBroken: it stopped, or did not take it in time.
        """
        assert self._map is not None, f"stream {self._name} was closed"
        deadline, pause = time.monotonic() + self._seconds, _FIRST_SLEEP
        while number - self._number(RELEASED) >= 2:
            self._check(number, deadline)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP)
        start = number % 2 * self._area
        return self._map[start : start + self._area]

    def commit(self, number: int) -> None:
        """Bucket `number` is whole in its area."""
        self._write(SENT, number + 1)

    def close(self) -> None:
        """Let the file go; the receiver learns that nothing more comes."""
        self._write(SENDER_STOPPED, 1)
        self._map = None
        os.close(self._descriptor)

    def _check(self, number: int, deadline: float) -> None:
        waited = f"bucket {number - 2} of stream {self._name}"
        stopped = self._number(RECEIVER_STOPPED)
        if stopped or self._receiver_died():
            why = "stopped" if stopped else "died"
            raise StreamBroken(f"{waited} was not taken: the server's loader {why}.")
        if time.monotonic() > deadline:
            raise StreamBroken(
                f"{waited} was not taken within {self._seconds:g} s by the server's loader."
            )

    def _receiver_died(self) -> bool:
        """Whether it started and its lock is free."""
        started = bool(self._number(RECEIVER_STARTED))
        return started and not _is_locked(self._descriptor, RECEIVER_STARTED)

    def _write(self, offset: int, number: int) -> None:
        os.pwrite(self._descriptor, number.to_bytes(8, "little"), offset)

    def _number(self, offset: int) -> int:
        return int.from_bytes(os.pread(self._descriptor, 8, offset), "little")


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
