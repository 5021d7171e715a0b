"""The engine's side of benchmarks/weight_sync.py: a real server, and each way to publish to it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.weight_sync_memory import descendants, watching
from benchmarks.weight_sync_ranks import Trainer, give_back
from hybridflow import owned
from hybridflow.rollout.launch import ServerConfig, start_server
from hybridflow.weight_sync.endpoint import Sent
from hybridflow.weight_sync.folders import memory, own_folder
from hybridflow.weight_sync.inbox import EngineSide, PhaseReport
from hybridflow.weight_sync.publication import publish_to
from hybridflow.weight_sync.slots import SlotLayout
from hybridflow.weight_sync.streams import STAGING, TRAILER, cut
from hybridflow.weight_sync.transports import make_inbox
from hybridflow.weight_sync.wiring import SyncSettings, Wiring
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard import Seat

BUCKET = 8 << 20
WATCHED, TIMED = 2, 3
"""Publications of each way: first those whose memory is watched, then those that are timed."""
_PAGE = 4096
_SECONDS = 120.0


@dataclass(frozen=True)
class Way:
    """A transport and mode of ours."""

    transport: str
    mode: str = "standby"
    full_every: int | None = None


WAYS = {
    "direct, standby": Way("direct"),
    "direct, bucketed": Way("direct", "bucketed"),
    "broadcast": Way("broadcast"),
    "disk, full": Way("disk"),
    "disk, delta": Way("disk", full_every=100),
}


class Fleet:
    """One server with the trainer's ranks beside it.

    Args:
        model: HuggingFace folder in float32.
    """

    def __init__(self, model: Path, layout: ParallelLayout, tp: int, logs: Path) -> None:
        self.trainer = Trainer(model, layout, logs)
        self._folder = own_folder(memory())
        self._versions = own_folder(memory())
        self._tp, self._version = tp, 0
        config = ServerConfig(
            "sglang",
            model,
            tp=tp,
            log_path=logs / "server.log",
            sync_folder=self._folder,
            max_running_requests=8,
            request_timeout=_SECONDS,
            start_timeout=280.0,
        )
        try:
            self._server = start_server(config)
        except BaseException:
            self._remove()
            raise
        self._client = self._server.client()
        here = Seat("here", None)
        self._wiring = Wiring(
            model_path=str(model),
            layout=layout,
            dtype="float32",
            tp=tp,
            ep=1,
            device="cpu",
            trainer=(here,) * layout.world,
            engines=((here,) * tp,),
            sync=SyncSettings(
                "direct", "standby", BUCKET, "retract", None, _SECONDS, str(self._versions)
            ),
        )
        self._warm()

    @property
    def wiring(self) -> Wiring:
        """Of the trainer and the server."""
        return self._wiring

    def stop(self) -> None:
        """End server and ranks."""
        self._client.close()
        self._server.stop()
        self._remove()

    def measure(self, name: str) -> dict[str, Any]:
        """Every publication of one way: its seconds, bytes and memory."""
        give_back()
        way = _Ours(self, WAYS[name]) if name in WAYS else _Gathered(self, name)
        sides = {
            "trainer": self.trainer.pids,
            "worker": way.worker_pids,
            "server": descendants(self._server.pid),
        }
        folders = [self._folder, self._versions, *self.trainer.folders]
        try:
            with watching(sides, folders) as peaks:
                way.open()
                first = [self._publish(way) for _ in range(WATCHED)]
            timed = [self._publish(way) for _ in range(TIMED)]
        finally:
            way.close()
        return {
            "first": first[0]["seconds"],
            "timed": [each["seconds"] for each in timed],
            "bytes": timed[-1]["bytes"],
            "gathered_bytes": timed[-1]["gathered_bytes"],
            "peak": vars(peaks),
            **way.bound(),
        }

    def _publish(self, way: _Ours | _Gathered) -> dict[str, Any]:
        self._version += 1
        self.trainer.run("change", self._version)
        self.trainer.run("gathered_bytes")
        start = time.perf_counter()
        found = way.publish(self._version)
        found["seconds"]["total"] = time.perf_counter() - start
        found["gathered_bytes"] = sum(self.trainer.run("gathered_bytes"))
        if isinstance(way, _Gathered):
            want = self.trainer.run("checksum", self._tp)[0]
            assert self._client.checksum() == want, f"{way} left other weights in the server"
        return found

    def _warm(self) -> None:
        """What a server and the ranks do once only is done before the first way is watched."""
        self._client.checksum()
        self._client.load_through(self._folder, [{"operation": "names"}] * self._tp)
        self.trainer.run("checksum", self._tp)

    def _remove(self) -> None:
        self.trainer.stop()
        for folder in (self._folder, self._versions):
            owned.remove(folder)

    def inbox(self, wiring: Wiring) -> EngineSide:
        """The engine's side, as the rollout worker has it."""
        made = make_inbox(wiring, 0, self._folder, "127.0.0.1")
        return EngineSide(0, made, lambda: self._client)

    def url(self) -> str:
        """Of the server."""
        return self._client.url


class _Ours:
    """A transport of ours, driven as a run drives it."""

    engine = 0
    worker_pids: tuple[int, ...]

    def __init__(self, fleet: Fleet, way: Way) -> None:
        self._fleet, self.worker_pids = fleet, (os.getpid(),)
        sync = replace(
            fleet.wiring.sync,
            transport=way.transport,
            mode=way.mode,
            full_every=way.full_every,
        )
        self._wiring = replace(fleet.wiring, sync=sync)
        self._pool = ThreadPoolExecutor(4)

    def open(self) -> None:
        """Connect the two sides."""
        self._side = self._fleet.inbox(self._wiring)
        self._fleet.trainer.run("connect", self._wiring)

    def publish(self, version: int) -> dict[str, Any]:
        """One version."""
        told: list[Any] = []

        def send(endpoints: Mapping[int, Any], number: int) -> Any:
            told.extend(self._fleet.trainer.run("send", endpoints, number))
            return told

        report = publish_to([self], send, version, overlaps=self._wiring.sync.overlaps)
        faults = {**report.failed, **report.behind, **report.mended}
        if faults:
            raise RuntimeError(f"version {version}: {faults}")
        return {"seconds": dict(report.seconds), "bytes": self._sent(told)}

    def phase(self, name: str, version: int, *args: Any) -> Future[PhaseReport]:
        """See ``EngineLink.phase``."""
        return self._pool.submit(getattr(self._side, name), version, *args)

    def _sent(self, told: list[Any]) -> int:
        """Bytes to all of the server's ranks, as the trainer's counted them while they sent."""
        transport, tp = self._wiring.sync.transport, self._wiring.tp
        if transport == "direct":
            sent: list[Sent] = [one for rank in told for one in rank.values()]
            return sum(one.bytes for one in sent)
        if transport == "broadcast":
            return told[0].bytes * tp
        # Written once and read by each rank of the server; a delta by the worker, which builds
        # the version that the server reads.
        return told[0].bytes * (2 if self._wiring.sync.full_every else 1 + tp)

    def bound(self) -> dict[str, int]:
        """What the mode states as its extra memory, and its buffers for moving elements."""
        wiring = self._wiring
        if wiring.sync.transport != "direct":
            return {}
        threads = wiring.layout.world + wiring.tp
        if wiring.sync.mode == "standby":
            layouts = [SlotLayout(targets, torch.float32) for targets in wiring.plan.targets]
            return {"stated": 2 * sum(each.bytes for each in layouts), "staging": threads * STAGING}
        stated = 0
        for rank in range(wiring.tp):
            for copies in wiring.routes.receives(0, rank).values():
                largest = max(bucket.bytes for bucket in cut(wiring.plan, copies, BUCKET))
                stated += 2 * (largest + TRAILER) + 3 * _PAGE
        return {"stated": stated, "staging": threads * STAGING}

    def close(self) -> None:
        """Give everything back."""
        self._fleet.trainer.run("disconnect")
        self._side.close()
        self._pool.shutdown()


class _Gathered:
    """A way of others, driven by trainer rank 0."""

    worker_pids: tuple[int, ...] = ()

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet, self._name = fleet, name

    def __str__(self) -> str:
        return self._name

    def open(self) -> None:
        """Connect rank 0 to the server."""
        wiring = self._fleet.wiring
        self._fleet.trainer.run("connect_gather", self._name, self._fleet.url(), wiring.tp)

    def publish(self, version: int) -> dict[str, Any]:
        """One version."""
        return self._fleet.trainer.run("gather", version)[0]

    def bound(self) -> dict[str, int]:
        """None is stated."""
        return {}

    def close(self) -> None:
        """Give everything back."""
        self._fleet.trainer.run("disconnect")


def memcpy(size: int) -> list[float]:
    """Seconds of one copy of ``size`` bytes by one thread, in memory that was touched before."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return seconds
