"""Sending one stream of buckets, through shared memory or a channel to another host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hybridflow.weight_sync.areas import AreaSender, StreamBroken
from hybridflow.weight_sync.streams import TRAILER, Bucket, CopiesDigest, gather, pack, trailer

FAULTS = (StreamBroken, OSError, RuntimeError, ValueError)
"""What keeps one engine from its bytes; anything else is a fault of our own."""
_HASHED = 1 << 20
"""Most bytes that are copied at once to be hashed."""


class Channel(Protocol):
    """A stream of buckets to another host."""

    def send(self, number: int, tensor: Tensor) -> None:
        """Send one bucket; returns while it is under way, at most two are."""
        ...

    def finish(self) -> None:
        """Wait until every bucket was taken."""
        ...

    def close(self) -> None: ...


class Pipe(Protocol):
    """A stream's way."""

    def area(self, number: int, size: int) -> Tensor:
        """Where bucket ``number`` is packed, uint8 [size]."""
        ...

    def commit(self, number: int, area: Tensor) -> None:
        """It is whole."""
        ...

    def finish(self) -> None:
        """Wait until every bucket was taken, where the way tells."""
        ...

    def close(self) -> None:
        """End the stream."""
        ...


class AreaPipe:
    """Buckets through shared memory: packed where the receiver takes them from."""

    def __init__(self, sender: AreaSender) -> None:
        self._sender = sender

    def area(self, number: int, size: int) -> Tensor:
        """Where bucket ``number`` is packed, uint8 [size]."""
        return self._sender.area(number)[:size]

    def commit(self, number: int, area: Tensor) -> None:
        """It is whole."""
        self._sender.commit(number)

    def finish(self) -> None:
        """The server's own status tells whether it took the last ones."""

    def close(self) -> None:
        """End the stream."""
        self._sender.close()


class RemotePipe:
    """Buckets through a channel to another host: two buffers, one packed while one is sent."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

    def area(self, number: int, size: int) -> Tensor:
        """Where bucket ``number`` is packed, uint8 [size]."""
        if len(self._buffers[number % 2]) < size:
            self._buffers[number % 2] = torch.empty(size, dtype=torch.uint8)
        return self._buffers[number % 2][:size]

    def commit(self, number: int, area: Tensor) -> None:
        """It is whole."""
        self._channel.send(number, area)

    def finish(self) -> None:
        """Wait until every bucket was taken."""
        self._channel.finish()

    def close(self) -> None:
        """End the stream."""
        self._channel.close()


class Stream:
    """One stream. Its first failure is kept and ends it.

    Args:
        buckets: what is sent.
        values: gives a copy's elements by its number in the plan.
        nonce: of the publication.
        open_pipe: called for the first bucket.
        check: is given a copy's number and some of its elements, before they are sent.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        values: Callable[[int], Tensor],
        nonce: str,
        open_pipe: Callable[[], Pipe],
        check: Callable[[int, Tensor], None],
    ) -> None:
        self.buckets, self._values, self._nonce, self._open = buckets, values, nonce, open_pipe
        self._check = check
        self._pipe: Pipe | None = None
        self._digest = CopiesDigest()
        self.fault, self.seconds = "", 0.0

    def advance(self, number: int) -> None:
        """Send bucket ``number``, if there is one."""
        if number < len(self.buckets):
            self._keep_fault(lambda: self._send(number))

    @property
    def bytes(self) -> int:
        """That were packed so far, without trailers."""
        return self._digest.bytes

    def finish(self) -> str:
        """Wait until all was taken where the channel tells; the digest, empty after a fault."""
        if self._pipe is not None:
            self._keep_fault(self._pipe.finish)
        return "" if self.fault else self._digest.hex()

    def close(self) -> None:
        """End the channel; the receiver learns of it."""
        if self._pipe is not None:
            self._pipe.close()

    def _keep_fault(self, act: Callable[[], None]) -> None:
        if self.fault:
            return
        start = time.perf_counter()
        try:
            act()
        except FAULTS as error:
            self.fault = f"{type(error).__name__}: {error}"
        self.seconds += time.perf_counter() - start

    def _send(self, number: int) -> None:
        if self._pipe is None:
            self._pipe = self._open()
        bucket = self.buckets[number]
        area = self._pipe.area(number, bucket.bytes + TRAILER)
        payload = area[: bucket.bytes]
        pieces = [(piece, self._values(piece.copy)) for piece in bucket.pieces]
        pack(pieces, payload)
        for piece, values in pieces:  # of what was read, not of what was written
            step = max(1, _HASHED // values.itemsize)
            for start in range(piece.start, piece.stop, step):
                flat = gather(values, start, min(start + step, piece.stop))
                self._check(piece.copy, flat)
                self._digest.add(flat)
        tail = bytearray(trailer(self._nonce, number, payload))
        area[bucket.bytes :].copy_(torch.frombuffer(tail, dtype=torch.uint8))
        self._pipe.commit(number, area)
