"""The sending end of a stream of buckets between two processes on one GPU.

A trainer rank packs its copies, in the server's own layout, into one of two buffers on the device;
the server's loader (`cuda_ipc_channel`) opens these and copies from there. The stream's mapped file
carries turns and where each bucket is, so that an end that died is noticed as in shared memory.

Bytes stay on the device but for their digests: to be hashed each goes to the host twice here (as a
copy's and as a bucket's), and on the server three times (bucket, boxes, whole parameters).
"""

from __future__ import annotations

import base64
import json
import logging
import time
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.weight_sync.areas import (
    RECEIVER_STARTED,
    RELEASED,
    SENDER_STOPPED,
    SENT,
    AreaSender,
)
from hybridflow.weight_sync.cuda_memory import SharedDeviceMemory
from megatron_bridge.reshard import Seat

KIND = "cuda_ipc"
ROOM = 4096
"""Bytes that tell where a bucket is, blanks at their end."""
_SLEEP = 1e-3


def share_a_device(trainer: Seat, engine: Seat) -> bool:
    """Whether two ranks run on one GPU."""
    return trainer.device is not None and trainer == engine


def message(uuid: str, handle: bytes, size: int) -> bytes:
    """Where a bucket is, as `cuda_ipc_channel.read_message` takes it."""
    told = {
        "kind": KIND,
        "device": uuid,
        "handle": base64.b64encode(handle).decode(),
        "bytes": size,
    }
    return json.dumps(told).encode().ljust(ROOM)


class CudaIpcPipe:
    """Buckets of at most `size` bytes, packed on `device`, to the stream whose file is `path`."""

    def __init__(
        self, path: Path, size: int, device: torch.device, name: str, seconds: float
    ) -> None:
        self._device, self._name, self._seconds = device, name, seconds
        self._turns = Turns(path, ROOM, name, seconds)
        self._memory: list[SharedDeviceMemory] = []
        try:
            for _ in range(2):
                self._memory.append(SharedDeviceMemory(size, device))
        except BaseException:
            self.close()
            raise

    def area(self, number: int, size: int) -> Tensor:
        """Where bucket ``number`` is packed, uint8 [size] on the device."""
        self._turns.area(number)
        return self._memory[number % 2].tensor[:size]

    def commit(self, number: int, area: Tensor) -> None:
        """It is whole: what packs it is over before the other process hears of it."""
        torch.cuda.current_stream(self._device).synchronize()
        memory = self._memory[number % 2]
        text = bytearray(message(memory.uuid, memory.handle, memory.bytes))
        self._turns.area(number).copy_(torch.frombuffer(text, dtype=torch.uint8))
        self._turns.commit(number)

    def finish(self) -> None:
        """Wait until every bucket was copied; StreamBroken where one was not."""
        self._turns.wait_until_taken()

    def close(self) -> None:
        """End the stream, and free its memory once the server has let it go."""
        if self._turns.withdraw():
            for memory in self._memory:
                memory.free()
        else:
            logging.getLogger(__name__).warning(
                "%s: the server has held its buckets for %g s after the stream's end; their "
                "%d bytes on the GPU stay taken",
                self._name,
                self._seconds,
                sum(memory.bytes for memory in self._memory),
            )
        self._memory = []
        self._turns.close()


class Turns(AreaSender):
    """Whose turn it is, where what is sent stays the sender's."""

    def wait_until_taken(self) -> None:
        """Until each bucket was released; StreamBroken when the receiver ends or is late."""
        deadline = time.monotonic() + self._seconds
        while (taken := self._number(RELEASED)) < self._number(SENT):
            self._check(taken + 2, deadline)
            time.sleep(_SLEEP)

    def withdraw(self) -> bool:
        """Offer nothing any more. Whether the receiver, if there is one, has let go in time.

        It has when its lock is free: the engine's worker may say for a loader that hangs that it
        stopped. One that starts later finds nothing sent, or this side sees it start.
        """
        if self._number(RELEASED) < self._number(SENT):
            self._write(SENT, 0)
        self._write(SENDER_STOPPED, 1)
        deadline = time.monotonic() + self._seconds
        while self._number(RECEIVER_STARTED) and not self._receiver_died():
            if time.monotonic() > deadline:
                return False
            time.sleep(_SLEEP)
        return True
