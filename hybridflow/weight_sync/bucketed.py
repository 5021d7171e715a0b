"""Bucketed: the paused server's loader takes buckets as they come; nothing waits beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridflow.weight_sync import cuda_ipc
from hybridflow.weight_sync.areas import create_areas, reset_areas, stop_areas
from hybridflow.weight_sync.checksum import engine_digest, rank_digest
from hybridflow.weight_sync.cuda_ipc import share_a_device
from hybridflow.weight_sync.endpoint import stream_name
from hybridflow.weight_sync.receiver import LoaderClient, Proofs, Receiver
from hybridflow.weight_sync.streams import TRAILER, Bucket, entries
from megatron_bridge.reshard import Routes

_PAGE = 4096


class BucketedReceiver(Receiver):
    """Each stream has room for two buckets in shared memory, and there is no way back.

    Where both ends are on one GPU the sender has the room there, and the file says where.

    A server whose load failed holds parts of two versions until the version was sent again.
    """

    mode = "bucketed"

    def __init__(self, routes: Routes, engine: int, *args: Any, **named: Any) -> None:
        super().__init__(routes, engine, *args, **named)
        self._on_device = {
            (source, rank)
            for rank, sources in enumerate(self._receives)
            for source in sources
            if share_a_device(routes.trainer[source], routes.engines[engine][rank])
        }

    def _places(self, version: int) -> dict[str, Any]:
        """A file of two buckets for each stream, no larger than what passes through it."""
        areas = {}
        for source, rank, buckets in self._streams():
            path, area = self._area(source, rank, buckets)
            if not path.exists():
                create_areas(path, area)
            reset_areas(path, area)
            areas[source, rank] = (str(path), area)
        return {"areas": areas}

    def receive(self, version: int) -> None:
        """Nothing comes beside the server."""

    def prove(self, version: int, proofs: Proofs) -> None:
        """The loader verifies each bucket; what it made of them is for ``check``."""

    def load(self, client: LoaderClient, version: int) -> None:
        """Have the loader inside the paused server take the buckets.

        Raises:
            Exception: of the loader, or of a stream from another host; names it.
        """
        try:
            self._take(client, version)
        except Exception:
            self._stop_areas(version)
            raise
        self.bytes = self._plan.bytes_before[-1]

    def give_up(self, version: int, why: str) -> None:
        """Senders learn that no loader takes their buckets.

        Raises:
            PairError: those of other hosts did not come to hear it.
        """
        self._stop_areas(version)
        if self._remote:
            self._refuse_incoming(why)

    def _stop_areas(self, version: int) -> None:
        for path, _ in self._opened(version).areas.values():
            stop_areas(Path(path))

    def _take(self, client: LoaderClient, version: int) -> None:
        controls = self._controls(version)
        flush = not self._keep_cache
        if not self._remote:
            client.load_through(self._folder, controls, flush_cache=flush)
            return
        with self._incoming(version) as incoming:
            incoming.into_areas(self._opened(version).areas)
            client.load_through(self._folder, controls, flush_cache=flush)

    def check(self, client: LoaderClient, version: int, proofs: Proofs) -> str:
        """The digest of the server's live parameters, after comparing what each trainer rank
        hashed as it sent with the same boxes of them.

        Raises:
            WeightMismatch: names each pair of ranks that differ.
        """
        controls = [
            {
                "operation": "boxes",
                "parameters": layout.entries(),
                "boxes": {
                    str(source): [self._live_box(number) for number in copies]
                    for source, copies in sources.items()
                },
            }
            for layout, sources in zip(self._layouts, self._receives, strict=True)
        ]
        statuses = client.load_through(self._folder, controls, flush_cache=False)
        found = [
            {int(source): digest for source, digest in status.digests.items()}
            for status in statuses
        ]
        self._compare(found, proofs, "the server")
        live = self._ask_all(client, {"operation": "digest"})
        return engine_digest(map(rank_digest, live))

    def restore(self, client: LoaderClient, version: int) -> str:
        """ValueError: nothing is kept beside the server."""
        raise ValueError(
            f"engine {self._engine} keeps no version beside its server in mode bucketed."
        )

    def _controls(self, version: int) -> list[dict[str, Any]]:
        streams: list[list[dict[str, Any]]] = [[] for _ in self._layouts]
        for source, rank, buckets in self._streams():
            path, area = self._area(source, rank, buckets)
            told = [{"bytes": b.bytes, "entries": entries(self._plan, b)} for b in buckets]
            name = stream_name(source, (self._engine, rank))
            kind = cuda_ipc.KIND if (source, rank) in self._on_device else "shared_memory"
            stream = {"name": name, "kind": kind, "file": path.name, "area": area, "buckets": told}
            streams[rank].append(stream)
        return [
            {
                "operation": "bucketed",
                "nonce": self._opened(version).nonce,
                "deadline": self._seconds,
                "parameters": layout.entries(),
                "streams": taken,
            }
            for layout, taken in zip(self._layouts, streams, strict=True)
        ]

    def _streams(self) -> Iterator[tuple[int, int, tuple[Bucket, ...]]]:
        for rank, sources in enumerate(self._receives):
            for source in sources:
                yield source, rank, self._buckets(source, rank)

    def _area(self, source: int, rank: int, buckets: Sequence[Bucket]) -> tuple[Path, int]:
        name = f"engine{self._engine}-rank{rank}-from{source}.buckets"
        if (source, rank) in self._on_device:
            return self._folder / name, cuda_ipc.ROOM
        largest = max(bucket.bytes for bucket in buckets) + TRAILER
        return self._folder / name, -(-largest // _PAGE) * _PAGE

    def _live_box(self, number: int) -> list:
        copy = self._plan.copies[number]
        return [copy.parameter, [list(interval) for interval in copy.target]]
