"""The engine's side of direct transport: shards from the trainer's ranks to one engine's server.

What both modes have in common; see `StandbyReceiver` and `BucketedReceiver`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hybridflow.weight_sync.checksum import engine_digest, rank_digest
from hybridflow.weight_sync.endpoint import Endpoint, Link, Sent, stream_name
from hybridflow.weight_sync.inbox import SendFailed, WeightMismatch
from hybridflow.weight_sync.remote import Incoming, Listening
from hybridflow.weight_sync.slots import SlotLayout
from hybridflow.weight_sync.streams import Bucket, cut
from megatron_bridge.reshard import Routes

_NAMED = 5
Proofs = Sequence[Mapping[Link, Sent]]
"""What each trainer rank says it sent."""


class LoaderClient(Protocol):
    """What is asked of the server's client."""

    url: str

    def load_through(
        self, folder: str | Path, controls: Sequence[dict[str, Any]], *, flush_cache: bool = ...
    ) -> Sequence[Any]: ...
    def checksum(self) -> str: ...


class Receiver:
    """Takes versions for one engine, whose server was started with ``folder`` as sync folder.

    Args:
        routes: who sends which copy.
        engine: this engine's number.
        folder: of this run alone, in shared memory, on the engine's host.
        bucket: most bytes of a bucket.
        seconds: deadline of each wait for a sender.
        device: "cuda" where the server's own checksum is another than `weight_sync.checksum`'s.
        listener: takes streams from other hosts; needed where ``routes`` has such.
        keep_cache: samples that are paused in place go on with their cache, of older weights;
            without it a server with such samples refuses to load.

    Attributes:
        bytes: that reached this engine since ``open``.

    Raises:
        ValueError: a route from another host without a listener.
    """

    mode: str

    def __init__(
        self,
        routes: Routes,
        engine: int,
        folder: str | Path,
        *,
        bucket: int = 512 << 20,
        seconds: float = 600.0,
        device: str = "cpu",
        listener: Listening | None = None,
        keep_cache: bool = False,
    ) -> None:
        self._plan, self._engine, self._folder = routes.plan, engine, Path(folder)
        self._bucket, self._seconds, self._device = bucket, seconds, device
        dtype = getattr(torch, self._plan.dtype)
        self._layouts = [SlotLayout(parameters, dtype) for parameters in self._plan.targets]
        self._receives = [routes.receives(engine, rank) for rank in range(self._plan.ranks)]
        self._host = routes.engines[engine][0].host
        self._remote = [
            (source, rank)
            for rank, sources in enumerate(self._receives)
            for source in sources
            if routes.trainer[source].host != self._host
        ]
        if self._remote and listener is None:
            raise ValueError(
                f"engine {engine} on {self._host} takes shards of trainer ranks of other hosts "
                "and has no listener for them."
            )
        self._listener, self._keep_cache = listener, keep_cache
        self._cut: dict[tuple[int, int], tuple[Bucket, ...]] = {}
        self._endpoint: Endpoint | None = None
        self.bytes = 0

    def open(self, version: int) -> Endpoint:
        """Make ready for ``version``.

        Raises:
            ValueError: shared memory has too little room.
        """
        self.bytes = 0
        self._endpoint = Endpoint(
            engine=self._engine,
            version=version,
            mode=self.mode,
            host=self._host,
            nonce=uuid.uuid4().hex,
            bucket=self._bucket,
            seconds=self._seconds,
            listener=None if self._listener is None else self._listener.endpoint,
            **self._places(version),
        )
        return self._endpoint

    def digest(self, client: LoaderClient) -> str:
        """The digest of the server's live parameters, as the loader inside it finds them."""
        return engine_digest(map(rank_digest, self._ask_all(client, {"operation": "digest"})))

    def close(self) -> None:
        """Remove this engine's files."""
        for path in self._folder.glob(f"engine{self._engine}-*"):
            path.unlink(missing_ok=True)
        if self._listener is not None:
            self._listener.close()

    def _places(self, version: int) -> dict[str, Any]:
        """``slots`` or ``areas`` of the endpoint, ready to be written to."""
        raise AssertionError("each mode has its own")

    def _buckets(self, source: int, rank: int) -> tuple[Bucket, ...]:
        """What comes from one trainer rank to one engine rank."""
        if (source, rank) not in self._cut:
            copies = self._receives[rank][source]
            self._cut[source, rank] = cut(self._plan, copies, self._bucket)
        return self._cut[source, rank]

    def _opened(self, version: int) -> Endpoint:
        assert self._endpoint is not None and self._endpoint.version == version, "open comes first"
        return self._endpoint

    def _incoming(self, version: int) -> Incoming:
        """The streams from other hosts; there are some."""
        assert self._listener is not None
        buckets = {
            (source, (self._engine, rank)): self._buckets(source, rank)
            for source, rank in self._remote
        }
        return Incoming(self._listener, self._opened(version), buckets)

    def _refuse_incoming(self, why: str) -> None:
        """Tell the senders of other hosts, as they come, that nobody takes what they send."""
        assert self._listener is not None
        names = [stream_name(source, (self._engine, rank)) for source, rank in self._remote]
        for channel in self._listener.accept(names, self._seconds).values():
            channel.fail(why)

    def _ask_all(self, client: LoaderClient, control: dict[str, Any]) -> list[Mapping[str, str]]:
        """The digests that every rank answers."""
        controls = [dict(control) for _ in self._layouts]
        statuses = client.load_through(self._folder, controls, flush_cache=False)
        return [status.digests for status in statuses]

    def _compare(self, found: Sequence[Mapping[int, str]], proofs: Proofs, holder: str) -> None:
        """Digests by engine rank and trainer rank against what the trainer ranks say.

        Raises:
            WeightMismatch: names each pair of ranks that differ.
            SendFailed: of those that sent anything all are equal; names the others, and why.
        """
        differ, unsent = [], []
        for rank, sources in enumerate(found):
            for source, digest in sources.items():
                link = (self._engine, rank)
                told = proofs[source].get(link)
                if told is None or told.fault:
                    why = "it sent nothing" if told is None else told.fault
                    unsent.append(f"{stream_name(source, link)}: {why}")
                elif told.digest != digest:
                    differ.append(
                        f"{stream_name(source, link)}: {told.digest[:16]} was sent, {holder} holds "
                        f"{digest[:16]}"
                    )
        if differ or unsent:
            kind = WeightMismatch if differ else SendFailed
            raise kind(f"engine {self._engine}: {some([*differ, *unsent])}.")


def some(faults: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
    return "; ".join(fault.rstrip(".") for fault in faults[:_NAMED]) + more
