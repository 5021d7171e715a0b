"""Versions over SGLang's own broadcast: whole HuggingFace tensors, for a server of any layout.

Trainer rank 0 gathers and broadcasts to a process group of its own with each engine's ranks, so
that an engine that fails costs the others nothing. What travels when is told over a pair channel,
whose nonce keeps strangers out; SGLang's group itself lets in whoever comes first.

Memory beside the model: two buckets on the trainer and one in the server; since SGLang takes whole
tensors alone, a bucket is as large as the largest tensor where that is larger.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.weight_sync.checksum import ServerDigest
from hybridflow.weight_sync.full_buckets import FullBucket, buckets
from hybridflow.weight_sync.inbox import WeightMismatch
from hybridflow.weight_sync.live_digest import live_digest
from hybridflow.weight_sync.pairs import Endpoint, Listener, PairChannel, connect
from hybridflow.weight_sync.pairs.broadcast_group import BroadcastGroup
from hybridflow.weight_sync.wiring import Wiring

_LEAVE_SECONDS = 10.0
_MESSAGE_BYTES = 64 << 20

Export = Callable[[], Iterator[tuple[str, Tensor]]]
"""Whole HuggingFace tensors on rank 0, nothing on the others; every rank exhausts it."""


@dataclass(frozen=True)
class Broadcasted:
    """What trainer rank 0 sent.

    Attributes:
        checksum: the digest that a server must show for it.
        bytes: to each engine.
        faults: why an engine did not get all of it.
    """

    version: int
    checksum: str
    bytes: int
    faults: Mapping[int, str] = field(default_factory=dict)


class BroadcastOutbox:
    """The trainer's side."""

    def __init__(self, wiring: Wiring, rank: int, export: Export) -> None:
        self._wiring, self._rank, self._export = wiring, rank, export

    def send(self, endpoints: Mapping[int, Endpoint], version: int) -> Broadcasted | None:
        """Broadcast to every engine of `endpoints`; rank 0 says what it sent."""
        if self._rank != 0:
            for _ in self._export():
                raise AssertionError("only rank 0 receives exported weights")
            return None
        wiring = self._wiring
        digest = ServerDigest(wiring.config, wiring.tp, wiring.ep, wiring.device)
        routes = [_Route(wiring, engine, end) for engine, end in sorted(endpoints.items())]
        sent = 0
        with ThreadPoolExecutor(max(len(routes), 1), "broadcast") as pool:
            list(pool.map(_Route.join, routes))
        try:
            for bucket in buckets(digest.watch(self._export()), wiring.config, wiring.sync.bucket):
                for route in routes:
                    route.flush()
                for route in routes:
                    route.send(bucket)
                sent += bucket.payload.numel()
            for route in routes:
                route.finish()
        finally:
            for route in routes:
                route.close()
        faults = {route.engine: route.fault for route in routes if route.fault}
        return Broadcasted(version, digest.result(), sent, faults)

    def close(self) -> None:
        """Nothing is held between versions."""


class BroadcastInbox:
    """One engine's side.

    Args:
        local: the folder that its server was started with.
        listener: where trainer rank 0 comes to; this inbox closes it.
    """

    def __init__(self, wiring: Wiring, engine: int, local: Path, listener: Listener) -> None:
        self._wiring, self._engine, self._local = wiring, engine, local
        self._listener = listener
        self.bytes = 0

    def open(self, version: int) -> Endpoint:
        """Where trainer rank 0 comes to."""
        self.bytes = 0
        return self._listener.endpoint

    def receive(self, version: int) -> None:
        """Nothing comes before the server is paused."""

    def prove(self, version: int, proofs: Any) -> None:
        """Nothing is here before the server holds it."""

    def load(self, client: Any, version: int) -> None:
        """Let the paused server join the trainer's group and take every bucket.

        Raises:
            PairError: the trainer did not come, died or gave up.
            RuntimeError: the server did.
        """
        stream, seconds = stream_name(self._engine), self._wiring.sync.seconds
        channel = self._listener.accept([stream], seconds, bucket=_MESSAGE_BYTES)[stream]
        try:
            self._take_all(client, channel)
        except Exception as error:
            channel.fail(str(error))
            raise
        channel.close()

    def give_up(self, version: int, why: str) -> None:
        """Trainer rank 0 hears of it when it comes.

        Raises:
            PairError: it did not come.
        """
        name, seconds = stream_name(self._engine), self._wiring.sync.seconds
        self._listener.accept([name], seconds, bucket=_MESSAGE_BYTES)[name].fail(why)

    def check(self, client: Any, version: int, proofs: Sequence[Broadcasted | None]) -> str:
        """The digest of the server's parameters; WeightMismatch when it is not the trainer's."""
        sent = proofs[0]
        assert sent is not None and sent.version == version, proofs
        if self._engine in sent.faults:
            raise WeightMismatch(f"{client.url}: not all was sent: {sent.faults[self._engine]}")
        found = self.digest(client)
        if found != sent.checksum:
            raise WeightMismatch(
                f"{client.url} holds other weights than version {version}: its digest is "
                f"{found[:16]}, the trainer's is {sent.checksum[:16]}"
            )
        return found

    def digest(self, client: Any) -> str:
        """The digest of the server's live parameters."""
        return live_digest(client, self._wiring.device, self._local, self._wiring.tp)

    def restore(self, client: Any, version: int) -> str:
        """ValueError: nothing is kept here."""
        raise ValueError(f"the broadcast of version {version} is over; the trainer sends it again")

    def close(self) -> None:
        """Wait for nobody any more."""
        self._listener.close()

    def _take_all(self, client: Any, channel: PairChannel) -> None:
        messages = _messages(channel)
        group = next(messages)
        name = group["group_name"]
        client.join_weight_group(group, channel.timeout)
        try:
            client.begin_weight_update()
            for bucket in messages:
                client.update_from_group(name, bucket, channel.timeout)
                self.bytes += bucket["bytes"]
            client.end_weight_update()
        except Exception as error:
            # A server that hangs is for its owner to end; one that lives must not keep the group.
            try:
                client.leave_weight_group(name, _LEAVE_SECONDS)
            except RuntimeError as second:
                error.add_note(f"nor did it leave the group: {second}")
            raise
        client.leave_weight_group(name, channel.timeout)


def stream_name(engine: int) -> str:
    """What the stream is called on both sides and in errors."""
    return f"broadcast to engine {engine}"


class _Route:
    """Rank 0's way to one engine. Its first failure is kept and ends it."""

    def __init__(self, wiring: Wiring, engine: int, endpoint: Endpoint) -> None:
        self.engine, self.fault = engine, ""
        self._wiring, self._endpoint = wiring, endpoint
        self._channel: PairChannel | None = None
        self._group: BroadcastGroup | None = None
        self._told = 0

    def join(self) -> None:
        """Meet the engine and form the group with its server."""

        def act() -> None:
            seconds, backend = self._wiring.sync.seconds, _backend(self._wiring.device)
            name = stream_name(self.engine)
            self._channel = connect(self._endpoint, name, seconds, bucket=_MESSAGE_BYTES)
            world, group = 1 + self._wiring.tp, f"hybridflow-{uuid.uuid4().hex}"
            # The server's scheduler blocks until rank 0 is there, so its store is open first.
            self._group = BroadcastGroup(backend, self._channel.own_host, world, group, seconds)
            self._tell(self._group.invitation)
            self._group.join(self._channel.take_receipts)

        self._keep_fault(act)

    def send(self, bucket: FullBucket) -> None:
        """Put a bucket on its way; its memory is borrowed until `flush`."""

        def act() -> None:
            assert self._group is not None
            payload = bucket.payload
            told = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
            self._tell({**told, "bytes": payload.numel()})
            self._group.broadcast(payload)

        self._keep_fault(act)

    def flush(self) -> None:
        """Wait until the bucket on its way has left its memory."""
        group = self._group
        if group is not None:
            self._keep_fault(group.flush)

    def finish(self) -> None:
        """Wait until the server has taken everything."""

        def act() -> None:
            assert self._channel is not None
            self.flush()
            self._tell({})
            self._channel.finish()

        self._keep_fault(act)

    def close(self) -> None:
        """Leave the group."""
        if self._channel is not None:
            self._channel.close()
        self._group = None

    def _keep_fault(self, act: Callable[[], None]) -> None:
        if self.fault:
            return
        try:
            act()
        except (RuntimeError, OSError) as error:
            words = self._channel.last_words() if self._channel is not None else None
            self.fault = f"{stream_name(self.engine)}: {words or error}"
            self.close()

    def _tell(self, message: Mapping[str, Any]) -> None:
        assert self._channel is not None
        tell(self._channel, self._told, message)
        self._told += 1


def tell(channel: PairChannel, number: int, message: Mapping[str, Any]) -> None:
    """Message `number`: its length in 8 bytes, then its JSON."""
    text = json.dumps(message).encode()
    for place, part in enumerate((len(text).to_bytes(8, "little"), text)):
        channel.send(2 * number + place, torch.frombuffer(bytearray(part), dtype=torch.uint8))


def _messages(channel: PairChannel) -> Iterator[dict[str, Any]]:
    """What rank 0 tells, up to its end; a message is acknowledged when the next is asked for."""
    number = 0
    while True:
        length = int.from_bytes(bytes(channel.receive(number, 8).numpy()), "little")
        channel.release(number)
        message = json.loads(bytes(channel.receive(number + 1, length).numpy()))
        if message:
            yield message
        channel.release(number + 1)
        number += 2
        if not message:
            return


def _backend(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"
