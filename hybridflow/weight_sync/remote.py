"""Taking streams of buckets from trainer ranks on other hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hybridflow.weight_sync.areas import AreaSender, StreamBroken
from hybridflow.weight_sync.endpoint import Endpoint, Link, stream_name
from hybridflow.weight_sync.slots import Slot
from hybridflow.weight_sync.streams import TRAILER, Bucket, scatter, trailer
from megatron_bridge.reshard import ReshardPlan


class Channel(Protocol):
    """The receiving end of a stream."""

    def receive(self, number: int, nbytes: int, /) -> Tensor:
        """Bucket ``number``, uint8 [nbytes], valid until it is released."""
        ...

    def release(self, number: int) -> None: ...
    def fail(self, reason: str) -> None: ...
    def close(self) -> None: ...


class Listening(Protocol):
    """Takes the peers of named streams."""

    endpoint: Any

    def accept(
        self, streams: Iterable[str], timeout: float, *, bucket: int = ...
    ) -> Mapping[str, Channel]: ...
    def close(self) -> None: ...


class Incoming(AbstractContextManager["Incoming"]):
    """The streams of one publication from other hosts, each read by a thread of its own.

    Args:
        listener: where their senders come to.
        endpoint: of the publication.
        buckets: what comes, by trainer rank and link.
    """

    def __init__(
        self,
        listener: Listening,
        endpoint: Endpoint,
        buckets: Mapping[tuple[int, Link], Sequence[Bucket]],
    ) -> None:
        self._listener, self._endpoint, self._buckets = listener, endpoint, buckets
        self._pool = ThreadPoolExecutor(len(buckets) + 1, "incoming")
        self._running: list[Any] = []

    def __exit__(self, *error: object) -> None:
        """Wait until every stream has ended; its failure is raised unless another is."""
        self._pool.shutdown(wait=True)
        if error[0] is None:
            for future in self._running:
                future.result()

    def into_slots(self, plan: ReshardPlan, slots: Sequence[Slot]) -> None:
        """Verify each bucket and write it into its rank's slot."""

        def write(source: int, link: Link, channel: Channel) -> None:
            slot = slots[link[1]]
            for number, bucket in enumerate(self._buckets[source, link]):
                whole = channel.receive(number, bucket.bytes + TRAILER)
                payload = self._verified(source, link, number, whole)
                _apply(plan, bucket, payload, slot)
                channel.release(number)

        self._each(write)

    def into_areas(self, areas: Mapping[tuple[int, int], tuple[str, int]]) -> None:
        """Hand each bucket on to the server's loader, which verifies it."""

        def hand_on(source: int, link: Link, channel: Channel) -> None:
            path, area = areas[source, link[1]]
            name = stream_name(source, link)
            sender = AreaSender(Path(path), area, name, self._endpoint.seconds)
            try:
                for number, bucket in enumerate(self._buckets[source, link]):
                    size = bucket.bytes + TRAILER
                    whole = channel.receive(number, size)
                    sender.area(number)[:size].copy_(whole)
                    sender.commit(number)
                    channel.release(number)
            finally:
                sender.close()

        self._each(hand_on)

    def _each(self, read: Callable[[int, Link, Channel], None]) -> None:
        """Start reading; the streams' ends are waited for on leaving."""
        names = {stream_name(*stream): stream for stream in self._buckets}

        def accept() -> None:
            largest = max(bucket.bytes for all_ in self._buckets.values() for bucket in all_)
            channels = self._listener.accept(
                list(names), self._endpoint.seconds, bucket=largest + TRAILER
            )
            reading = [
                pool.submit(_read_and_close, read, *names[name], channel)
                for name, channel in channels.items()
            ]
            for future in reading:
                future.result()

        pool = ThreadPoolExecutor(len(names), "stream")
        self._running.append(self._pool.submit(accept))
        self._running[-1].add_done_callback(lambda _: pool.shutdown(wait=False))

    def _verified(self, source: int, link: Link, number: int, whole: Tensor) -> Tensor:
        payload, tail = whole[:-TRAILER], whole[-TRAILER:]
        if trailer(self._endpoint.nonce, number, payload) != bytes(tail.numpy()):
            raise StreamBroken(
                f"bucket {number} of stream {stream_name(source, link)} is not what its sender "
                "hashed."
            )
        return payload


def _read_and_close(
    read: Callable[[int, Link, Channel], None], source: int, link: Link, channel: Channel
) -> None:
    try:
        read(source, link, channel)
    finally:
        channel.close()


def _apply(plan: ReshardPlan, bucket: Bucket, payload: Tensor, slot: Slot) -> None:
    for piece in bucket.pieces:
        copy = plan.copies[piece.copy]
        parameter = slot.tensor(copy.parameter)
        size = (piece.stop - piece.start) * parameter.itemsize
        flat = payload[piece.offset : piece.offset + size].view(parameter.dtype)
        scatter(flat, parameter, copy.target, piece.start)
