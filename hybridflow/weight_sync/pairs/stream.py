"""Buckets over a process group of two: one side sends, the other receives ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from hybridflow.weight_sync.pairs import link as links
from hybridflow.weight_sync.pairs.group import GlooPair
from hybridflow.weight_sync.pairs.link import Deadline, Link, PairError, PairTimeout

_BUFFERS = 2
_END_SECONDS = 1.0
"""How long after a peer's end its last bytes may still be on their way."""


class PairChannel:
    """One direction of buckets: the first `send` or `receive` decides which.

    Attributes:
        stream: the name that both sides gave it.
        own_host: this side's address, as the peer reaches it.
        bytes_sent, bytes_received: payload, without headers.
    """

    def __init__(
        self,
        link: Link,
        rank: int,
        stream: str,
        timeout: float,
        bucket: int,
        until: Deadline,
    ) -> None:
        self.stream, self.timeout, self.bucket = stream, timeout, bucket
        self.bytes_sent = self.bytes_received = 0
        self.own_host = link.own_host
        self._link = link
        self._under_way: tuple[int, Any] | None = None
        self._unreleased: set[int] = set()
        self._reader: _Reader | None = None
        try:
            self._group: GlooPair | None = GlooPair(link, rank, until)
        except (RuntimeError, OSError) as error:
            link.close()
            late = isinstance(error, PairTimeout) or until.over()
            kind = PairTimeout if late else PairError
            raise kind(f"{self}: the group was not formed: {error}") from error

    def __str__(self) -> str:
        return f"stream {self.stream!r} with {self._link.peer}"

    def send(self, number: int, tensor: Tensor) -> None:
        """Put bucket `number` (uint8 [nbytes], contiguous) on its way and return.

        Waits until the one before has left its memory: a sender with two buffers fills one while
        the other is under way. The memory is borrowed until the next `send`, or `flush`, returns.
        """
        assert self._reader is None, "this channel receives"
        assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
        assert tensor.numel() > 0, "an empty bucket"
        group = self._open_group()
        self.flush()
        with self._naming(f"bucket {number} was not sent"):
            self._read_receipts()
            self._link.send(links.BUCKET, number, tensor.numel())
            self._under_way = (number, group.send(tensor))
        self._unreleased.add(number)
        self.bytes_sent += tensor.numel()

    def take_receipts(self) -> None:
        """Read what the peer has said by now; PairError with its words if it gave up."""
        if self._unreleased:
            with self._naming(f"bucket {min(self._unreleased)} was not released"):
                self._read_receipts()

    def _read_receipts(self) -> None:
        while self._unreleased and self._link.readable():
            self._take_receipt(Deadline(self.timeout))

    def flush(self) -> None:
        """Wait until every bucket has left its memory."""
        if self._under_way is None:
            return
        (number, work), self._under_way = self._under_way, None
        group, until = self._open_group(), Deadline(self.timeout)
        with self._naming(f"bucket {number} was not taken", until):
            group.wait(work, until)

    def finish(self) -> None:
        """Wait until the peer has released every bucket; PairError with its words if it failed."""
        self.flush()
        while self._unreleased:
            with self._naming(f"bucket {min(self._unreleased)} was not released"):
                self._take_receipt(Deadline(self.timeout))

    def receive(self, number: int, nbytes: int) -> Tensor:
        """Bucket `number`, uint8 [nbytes]: the channel's memory until `release(number)`.

        The next bucket arrives meanwhile. PairError when the peer sends another bucket or size.
        """
        assert not self._unreleased and not self.bytes_sent, "this channel sends"
        group = self._open_group()
        if self._reader is None:
            self._reader = _Reader(self._link, group, self.bucket, self.timeout)
        with self._naming(f"bucket {number} ({nbytes:,} bytes) did not come"):
            got, bucket = self._reader.next()
        if (got, bucket.numel()) != (number, nbytes):
            reason = (
                f"bucket {number} of {nbytes:,} bytes was due, and bucket {got} of "
                f"{bucket.numel():,} bytes came"
            )
            self.fail(reason)
            raise PairError(f"{self}: {reason}")
        self.bytes_received += nbytes
        return bucket

    def release(self, number: int) -> None:
        """Bucket `number` is used up: its memory takes the one after the next."""
        assert self._reader is not None
        self._open_group()
        self._reader.release(number)
        with self._naming(f"bucket {number} was not acknowledged"):
            self._link.send(links.RECEIPT, number)

    def fail(self, reason: str) -> None:
        """Tell the peer why this side gives up, and close."""
        self._link.fail(reason)
        self.close()

    def last_words(self) -> str | None:
        """Why the peer gave up, where it said so and this side has not read it."""
        return None if self._group is None or self._reader else self._link.last_words()

    def close(self) -> None:
        """End the channel; safe to call again. A peer that waits sees an error at once."""
        self._link.close()
        if self._reader is not None:
            self._reader.stop()
        self._under_way = None
        self._group = None

    def _open_group(self) -> GlooPair:
        if self._group is None:
            raise PairError(f"{self} is closed")
        return self._group

    def _take_receipt(self, until: Deadline) -> None:
        kind, number, _ = self._link.receive(until)
        if kind != links.RECEIPT:
            raise PairError("the peer sends too, or speaks another protocol")
        self._unreleased.discard(number)

    @contextmanager
    def _naming(self, what: str, until: Deadline | None = None) -> Iterator[None]:
        """Closes on an error and says what it was about, in the peer's words where it left some."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            late = isinstance(error, PairTimeout) or (until is not None and until.over())
            words = None if late else self.last_words()
            self.close()
            kind = PairTimeout if late else PairError
            within = f" within {self.timeout:.0f} s" if late else ""
            raise kind(f"{self}: {what}{within}: {words or error}") from error


class _Reader:
    """Receives ahead: while one bucket is used, the next arrives in the other buffer."""

    def __init__(self, link: Link, group: GlooPair, bucket: int, timeout: float) -> None:
        self._link, self._timeout = link, timeout
        self._held: dict[int, Tensor] = {}
        self._free: SimpleQueue[Tensor | None] = SimpleQueue()
        self._arrived: SimpleQueue[tuple[int, int, Tensor] | Exception] = SimpleQueue()
        for _ in range(_BUFFERS):
            self._free.put(torch.empty(0, dtype=torch.uint8))
        arguments = (link, group, self._free, self._arrived, bucket, timeout)
        threading.Thread(target=_receive_ahead, args=arguments, daemon=True).start()

    def next(self) -> tuple[int, Tensor]:
        """The next bucket's number and bytes; raises what ended the stream, or PairTimeout."""
        item = self._next_item(Deadline(self._timeout))
        if isinstance(item, Exception):
            raise item
        got, nbytes, buffer = item
        self._held[got] = buffer
        return got, buffer[:nbytes]

    def _next_item(self, until: Deadline) -> tuple[int, int, Tensor] | Exception:
        """gloo does not always tell of a peer's death; the link does."""
        while not until.over():
            ended = self._link.ended()
            with suppress(Empty):
                return self._arrived.get(timeout=min(_END_SECONDS if ended else 0.2, until.left()))
            if ended:
                raise PairError("the peer's process ended, or it closed the stream")
        raise PairTimeout("the peer sent nothing")

    def release(self, number: int) -> None:
        """Give a bucket's buffer back."""
        self._free.put(self._held.pop(number))

    def stop(self) -> None:
        """Let the thread end; the closed link wakes it where it reads."""
        self._held.clear()
        self._free.put(None)


def _receive_ahead(
    link: Link,
    group: GlooPair,
    free: SimpleQueue[Tensor | None],
    arrived: SimpleQueue[tuple[int, int, Tensor] | Exception],
    bucket: int,
    timeout: float,
) -> None:
    """The reader's thread: a header, a free buffer, the payload; until the link ends."""
    try:
        while True:
            kind, number, nbytes = link.receive(None)
            if kind != links.BUCKET or not 0 < nbytes <= bucket:
                raise PairError(f"the peer offered {nbytes:,} bytes; at most {bucket:,} fit")
            buffer = free.get()
            if buffer is None:
                return
            if buffer.numel() < nbytes:
                del buffer  # before the larger one is made
                buffer = torch.empty(nbytes, dtype=torch.uint8)
            group.wait(group.receive(buffer[:nbytes]), Deadline(timeout))
            arrived.put((number, nbytes, buffer))
    except (RuntimeError, OSError) as error:
        arrived.put(error)
