"""The trainer's side of a publication: one rank writes its copies to where engines take them from.

On an engine's own host that is a slot (standby) or a mapped file of two buckets (bucketed), both in
shared memory, or for buckets to a rank on its own GPU memory there; to other hosts buckets go
through a channel of the process's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.weight_sync.areas import AreaSender
from hybridflow.weight_sync.cuda_ipc import CudaIpcPipe, share_a_device
from hybridflow.weight_sync.endpoint import Endpoint, Link, Sent, stream_name
from hybridflow.weight_sync.finite import require_finite
from hybridflow.weight_sync.slots import Slot, SlotLayout, open_slot
from hybridflow.weight_sync.stream_sender import (
    FAULTS,
    AreaPipe,
    Channel,
    Pipe,
    RemotePipe,
    Stream,
)
from hybridflow.weight_sync.streams import (
    STAGING,
    TRAILER,
    Bucket,
    CopiesDigest,
    cut,
    gather,
    ranges,
    scatter,
)
from megatron_bridge import regions
from megatron_bridge.reshard import Routes
from megatron_bridge.reshard_moves import read

Connect = Callable[[Endpoint, str], Channel]
"""Opens the named stream to an endpoint on another host."""


class Sender:
    """Sends one trainer rank's copies.

    Args:
        routes: who sends which copy.
        rank: this trainer rank.
        tensors: gives its own tensors by the index of their weight, asked at each publication.
        connect: opens streams to other hosts; needed where ``routes`` has such.
    """

    def __init__(
        self,
        routes: Routes,
        rank: int,
        tensors: Callable[[], Mapping[int, Tensor]],
        connect: Connect | None = None,
    ) -> None:
        self._plan, self._rank, self._connect = routes.plan, rank, connect
        self._give_tensors = tensors
        self._tensors: Mapping[int, Tensor] = {}
        self._sends = routes.sends(rank)
        self._host = routes.trainer[rank].host
        self._own_device = {
            (engine, place)
            for engine, place in self._sends
            if share_a_device(routes.trainer[rank], routes.engines[engine][place])
        }
        dtype = getattr(torch, self._plan.dtype)
        self._layouts = [SlotLayout(parameters, dtype) for parameters in self._plan.targets]
        self._slots: dict[str, Slot] = {}
        self._buckets: dict[tuple[Link, int], tuple[Bucket, ...]] = {}
        self._dtypes = self._kept_dtypes()

    def send(self, endpoints: Mapping[int, Endpoint], version: int) -> dict[Link, Sent]:
        """Send to every engine of ``endpoints``; one that fails costs the others nothing.

        Raises:
            ValueError: a tensor that is missing or of another dtype than the engine keeps.
            NonFiniteWeights: a tensor holds NaN or infinity.
        """
        wrong = [e.version for e in endpoints.values() if e.version != version]
        assert not wrong, f"endpoints of versions {wrong} for version {version}"
        self._forget_removed_slots()
        self._tensors = self._give_tensors()
        try:
            self._check_tensors()
            return self._send_all([partial(self._send_to, end) for end in endpoints.values()])
        finally:
            self._tensors = {}  # whoever offloads the model must not find its memory held here

    def _send_all(self, work: list[Callable[[], dict[Link, Sent]]]) -> dict[Link, Sent]:
        """Each engine by a thread of its own."""
        found: dict[Link, Sent] = {}
        with ThreadPoolExecutor(max(len(work), 1), "publish") as pool:
            for sent in pool.map(lambda act: act(), work):
                found |= sent
        return found

    def close(self) -> None:
        """Let slots go."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def _send_to(self, endpoint: Endpoint) -> dict[Link, Sent]:
        links = [link for link in self._sends if link[0] == endpoint.engine]
        if endpoint.mode == "standby" and endpoint.host == self._host:
            return {link: self._fill(link, endpoint) for link in links}
        return self._stream(links, endpoint)

    def _fill(self, link: Link, endpoint: Endpoint) -> Sent:
        start = time.perf_counter()
        digest, fault = CopiesDigest(), ""
        try:
            self._write(link, self._slot(link[1], endpoint), digest, endpoint.version)
        except FAULTS as error:
            fault = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - start
        return Sent("" if fault else digest.hex(), digest.bytes, seconds, fault)

    def _write(self, link: Link, slot: Slot, digest: CopiesDigest, version: int) -> None:
        """Write the copies; what is hashed is what was read, not what was written."""
        for number in self._sends[link]:
            copy = self._plan.copies[number]
            values, parameter = self._values(number), slot.tensor(copy.parameter)
            for start, stop in ranges(regions.lengths(copy.target), values.itemsize, STAGING):
                flat = gather(values, start, stop)
                self._require_finite(version, number, flat)
                digest.add(flat)
                scatter(flat, parameter, copy.target, start)

    def _stream(self, links: list[Link], endpoint: Endpoint) -> dict[Link, Sent]:
        """Send bucket n to every rank before bucket n + 1 to any."""
        streams = {
            link: Stream(
                self._cut(link, endpoint.bucket),
                self._values,
                endpoint.nonce,
                partial(self._pipe, link, endpoint),
                partial(self._require_finite, endpoint.version),
            )
            for link in links
        }
        try:
            for number in range(max((len(s.buckets) for s in streams.values()), default=0)):
                for stream in streams.values():
                    stream.advance(number)
            digests = {link: stream.finish() for link, stream in streams.items()}
        finally:
            for stream in streams.values():
                stream.close()
        return {
            link: Sent(digests[link], stream.bytes, stream.seconds, stream.fault)
            for link, stream in streams.items()
        }

    def _pipe(self, link: Link, endpoint: Endpoint) -> Pipe:
        name = stream_name(self._rank, link)
        if endpoint.host == self._host:
            path, area = endpoint.areas[self._rank, link[1]]
            if link in self._own_device:
                largest = max(bucket.bytes for bucket in self._cut(link, endpoint.bucket)) + TRAILER
                device = next(iter(self._tensors.values())).device
                return CudaIpcPipe(Path(path), largest, device, name, endpoint.seconds)
            return AreaPipe(AreaSender(Path(path), area, name, endpoint.seconds))
        if self._connect is None:
            raise RuntimeError(
                f"{name} crosses hosts ({self._host} to {endpoint.host}), and this rank has no "
                "way to connect"
            )
        return RemotePipe(self._connect(endpoint, name))

    def _cut(self, link: Link, bucket: int) -> tuple[Bucket, ...]:
        if (link, bucket) not in self._buckets:
            self._buckets[link, bucket] = cut(self._plan, self._sends[link], bucket)
        return self._buckets[link, bucket]

    def _values(self, copy: int) -> Tensor:
        """The copy's elements in this rank's tensor, in their order."""
        found = self._plan.copies[copy]
        return read(self._tensors[found.weight].detach(), found.source)

    def _require_finite(self, version: int, copy: int, flat: Tensor) -> None:
        name = self._plan.weights[self._plan.copies[copy].weight].key
        require_finite(flat, f"{name} of trainer rank {self._rank}", version)

    def _slot(self, rank: int, endpoint: Endpoint) -> Slot:
        """The slot, mapped once: each engine rank has two."""
        path = endpoint.slots[rank]
        if path not in self._slots:
            self._slots[path] = open_slot(path, self._layouts[rank])
        return self._slots[path]

    def _forget_removed_slots(self) -> None:
        """Let the memory go of engines that were closed or started anew."""
        for path, slot in list(self._slots.items()):
            if not slot.is_there():
                self._slots.pop(path).close()

    def _kept_dtypes(self) -> dict[int, set[torch.dtype]]:
        """What the engines keep each weight in that this rank sends."""
        kept: dict[int, set[torch.dtype]] = {}
        for copies in self._sends.values():
            for copy in (self._plan.copies[number] for number in copies):
                place = self._layouts[copy.target_rank].places[copy.parameter]
                kept.setdefault(copy.weight, set()).add(place.dtype)
        return kept

    def _check_tensors(self) -> None:
        faults = []
        for weight, dtypes in sorted(self._dtypes.items()):
            key, held = self._plan.weights[weight].key, self._tensors.get(weight)
            if held is None:
                faults.append(f"{key} is not among its tensors")
            elif dtypes != {held.dtype}:
                wanted = ", ".join(sorted(map(str, dtypes)))
                faults.append(f"{key} is {held.dtype}, the engine keeps it in {wanted}")
        if faults:
            raise ValueError(f"trainer rank {self._rank} cannot publish: {'; '.join(faults[:5])}.")
