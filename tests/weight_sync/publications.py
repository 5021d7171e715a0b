"""Engines with real servers and a trainer of threads or processes, in one test's hands.

Whatever is to go wrong in a publication is put before one engine's phase.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from hybridflow.rollout import Sampling, ServerConfig
from hybridflow.rollout.background import in_background
from hybridflow.rollout.client import RolloutClient
from hybridflow.weight_sync.endpoint import Endpoint, Link, Sent
from hybridflow.weight_sync.inbox import PhaseReport
from hybridflow.weight_sync.publication import PublishReport, publish_to
from hybridflow.weight_sync.sender import Sender
from hybridflow.weight_sync.wiring import SyncSettings, Wiring
from hybridflow.workers.rollout import RolloutWorker
from megatron_bridge.layout import ParallelLayout
from tests.weight_sync.pair_peers import Peer
from tests.weight_sync.shards import HERE, trainer_tensors

TRAINER = ParallelLayout(tp=2)
DEADLINE = 120.0
Proofs = list[dict[Link, Sent]]


class EngineUnderTest:
    """One engine: its worker as in a run, and what is to happen before its phases.

    Attributes:
        before: called once before the phase of that name.
        phases: that were begun.
    """

    def __init__(self, number: int, server: ServerConfig, folder: Path) -> None:
        self.engine = number
        self.before: dict[str, Callable[[], None]] = {}
        self.phases: list[Future[PhaseReport]] = []
        self.worker = RolloutWorker(
            0, 1, ("127.0.0.1", 0), server=server, sync_parent=str(folder), hang_seconds=DEADLINE
        )

    def phase(self, name: str, version: int, *args: Any) -> Future[PhaseReport]:
        """See ``EngineLink.phase``."""
        self.phases.append(in_background(name, partial(self._phase, name, version, *args)))
        return self.phases[-1]

    def _phase(self, name: str, version: int, *args: Any) -> PhaseReport:
        self.before.pop(name, lambda: None)()
        return self.worker.publication(name, version, *args)

    @property
    def client(self) -> RolloutClient:
        """Of the present server."""
        return self.worker._client

    def kill(self) -> None:
        """End the server's process with SIGKILL."""
        process = self.worker._server._process
        for server in psutil.Process(process.pid).children():
            server.kill()
        process.wait(DEADLINE)

    def repaired(self, version: int) -> PhaseReport:
        """A new server, and the version from beside it, as a run repairs an engine."""
        assert self.worker.restart_server() is None
        return self.worker.publication("restore", version)

    def alive(self) -> bool:
        return self.worker._server.alive()

    def paused(self) -> bool:
        return self.client.server_info()["paused"]


class Trainer:
    """Ranks of one checkpoint after another, each a thread.

    Attributes:
        before: called in a rank before it sends, by its number.
    """

    def __init__(self, wiring: Wiring, held: list[dict[int, torch.Tensor]]) -> None:
        self.held = held
        self.before: dict[int, Callable[[], None]] = {}
        self.senders = [
            Sender(wiring.routes, rank, partial(self.tensors, rank)) for rank in range(len(held))
        ]

    def tensors(self, rank: int) -> Mapping[int, torch.Tensor]:
        """What the rank holds now."""
        return self.held[rank]

    def send(self, endpoints: Mapping[int, Endpoint], version: int) -> Proofs:
        """All ranks at once."""

        def act(rank: int) -> dict[Link, Sent]:
            self.before.pop(rank, lambda: None)()
            return self.senders[rank].send(endpoints, version)

        with ThreadPoolExecutor(len(self.senders)) as pool:
            return list(pool.map(act, range(len(self.senders))))

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


class Publications:
    """Engines, and versions for them."""

    def __init__(self, engines: list[EngineUnderTest], model: Path, trained: Sequence[Path]):
        self.engines = engines
        self._model = model
        self._held = [trainer_tensors(folder, TRAINER) for folder in trained]
        self.version = 0
        self._plain: Wiring | None = None

    def connect(self, mode: str, *, bucket: int = 20_000, pause: str = "retract") -> Trainer:
        """Both sides anew, for a way to publish; the trainer holds the first checkpoint."""
        self.mode = mode
        sync = SyncSettings("direct", mode, bucket, pause, None, DEADLINE, "")
        if self._plain is None:
            seats = tuple(HERE for _ in range(TRAINER.world))
            engines = tuple((HERE,) for _ in self.engines)
            model = str(self._model)
            self._plain = Wiring(model, TRAINER, "float32", 1, 1, "cpu", seats, engines, sync)
        self.wiring = replace(self._plain, sync=sync)
        for planned in ("plan", "routes"):  # computed once for all ways
            self.wiring.__dict__[planned] = getattr(self._plain, planned)
        for engine in self.engines:
            engine.before.clear()
            engine.worker.connect(self.wiring, engine.engine)
        return Trainer(self.wiring, self._held[0])

    def holds(self, trainer: Trainer, checkpoint: int) -> None:
        """From here on the trainer's ranks hold that checkpoint."""
        trainer.held = self._held[checkpoint]

    def wait_for_senders(self, seconds: float) -> None:
        """How long engines wait for a sender in the next publications."""
        for engine in self.engines:
            side: Any = engine.worker._side
            side._inbox._seconds = seconds

    def publish(
        self, send: Callable[[Mapping[int, Any], int], Any], to: Sequence[EngineUnderTest] = ()
    ) -> PublishReport:
        """The next version to engines, by default to all."""
        self.version += 1
        overlaps = self.wiring.sync.overlaps
        return publish_to(to or self.engines, send, self.version, overlaps=overlaps)

    def again(
        self, send: Callable[[Mapping[int, Any], int], Any], engine: EngineUnderTest
    ) -> PublishReport:
        """The present version to one engine."""
        overlaps = self.wiring.sync.overlaps
        return publish_to([engine], send, self.version, overlaps=overlaps)


@contextmanager
def engines(
    model: Path,
    trained: Sequence[Path],
    folder: Path,
    count: int = 2,
    kind: str = "local",
    **server: Any,
) -> Iterator[Publications]:
    """``count`` engines of ``model``; afterwards nothing of them is left."""
    deadlines = {"start_timeout": 400.0, "request_timeout": DEADLINE}
    config = ServerConfig(kind, model, **deadlines, **server)
    with ThreadPoolExecutor(count) as pool:
        made = list(pool.map(lambda n: EngineUnderTest(n, config, folder), range(count)))
    try:
        yield Publications(made, model, trained)
    finally:
        for engine in made:
            engine.worker.close()
    assert not list(folder.iterdir())


def serves(engine: EngineUnderTest, version: int, digest: str) -> None:
    """It answers with that version's name, and its weights are those of the digest."""
    assert not engine.paused()
    assert engine.client.model_info()["weight_version"] == str(version)
    assert engine.client.checksum() == digest
    ((sample,),) = engine.client.generate([[5, 17, 33]], 1, Sampling(4, temperature=0.0))
    assert [span.version for span in sample.spans] == [str(version)]


def trainer_process(
    pipe: Connection,
    wiring: Wiring,
    rank: int,
    folder: str,
    endpoints: Mapping[int, Endpoint],
    version: int,
    dies_at: int,
) -> None:
    """Be one trainer rank; killed (SIGKILL) as it reads its ``dies_at``th copy."""
    torch.set_num_threads(1)
    held = trainer_tensors(Path(folder), TRAINER)[rank]
    reads = itertools.count()

    class Dying(dict[int, torch.Tensor]):
        def __getitem__(self, weight: int) -> torch.Tensor:
            if next(reads) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(weight)

    sender = Sender(wiring.routes, rank, lambda: Dying(held))
    pipe.send(sender.send(endpoints, version))


class DyingTrainer:
    """A trainer whose last rank is a process of its own that dies as it sends."""

    def __init__(self, others: Trainer, wiring: Wiring, folder: Path, dies_at: int) -> None:
        self._others, self._wiring, self._folder = others, wiring, folder
        self._dies_at = dies_at

    def send(self, endpoints: Mapping[int, Endpoint], version: int) -> Proofs:
        """RuntimeError, as a worker group's when one of its ranks died."""
        rank = TRAINER.world - 1
        process = Peer(
            trainer_process,
            self._wiring,
            rank,
            str(self._folder),
            endpoints,
            version,
            self._dies_at,
        )
        try:
            with ThreadPoolExecutor(rank) as pool:
                senders = self._others.senders[:rank]
                list(pool.map(lambda sender: sender.send(endpoints, version), senders))
            process.process.join(DEADLINE)
            assert process.process.exitcode == -signal.SIGKILL
        finally:
            process.end()
        raise RuntimeError(f"actor rank {rank} died")
