"""Versions from a trainer's live ranks to one server, compared with what a disk load gives it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.rollout import RolloutClient, Sampling, ServerConfig, start_server
from hybridflow.rollout.background import in_background
from hybridflow.weight_sync.inbox import EngineSide, PhaseReport
from hybridflow.weight_sync.publication import publish_to
from hybridflow.weight_sync.transports import make_inbox
from hybridflow.weight_sync.wiring import SyncSettings, Wiring
from megatron_bridge.reshard import Seat
from tests.servers import TOKEN
from tests.weight_sync.trainer import Trainer

PROMPTS = [[5, 17, 33], [40, 8, 9, 10, 11, 12, 13]]
_SMALL = 20_000  # bytes of a bucket; the tiny models' largest tensors are larger
WAYS: dict[str, dict[str, Any]] = {
    "standby": {"transport": "direct", "mode": "standby"},
    "bucketed": {"transport": "direct", "mode": "bucketed"},
    "disk": {"transport": "disk"},
    "deltas": {"transport": "disk", "full_every": 10},
    "broadcast": {"transport": "broadcast"},
}
DIRECT = ("standby", "bucketed")
LOCAL_WAYS = tuple(way for way in WAYS if way != "broadcast")  # that one is SGLang's own


@dataclass
class Served:
    """A running server that takes versions through ``folder``."""

    client: RolloutClient
    folder: Path
    tp: int = 1
    _versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def next_version(self) -> int:
        """A version that this server has not seen."""
        return next(self._versions)

    def answers(self) -> list[tuple[list[int], list[float]]]:
        """Greedy tokens of each prompt and their log-probabilities."""
        groups = self.client.generate(PROMPTS, 1, Sampling(12, temperature=0.0))
        return [(sample.tokens, sample.logprobs) for (sample,) in groups]


@contextmanager
def served(
    engine: str, model: Path, work: Path, tp: int = 1, dtype: str = "float32"
) -> Iterator[Served]:
    """A server of the model."""
    folder = work / f"sync-{engine}-{tp}"
    folder.mkdir()
    config = ServerConfig(
        engine,
        model,
        dtype=dtype,
        tp=tp,
        sync_folder=folder,
        log_path=work / f"{engine}-{tp}.log",
        start_timeout=400,
        request_timeout=120,
        token=TOKEN,
    )
    server = start_server(config)
    try:
        yield Served(server.client(), folder, tp)
    finally:
        server.stop()


class Publishing:
    """A trainer and a server, joined by one transport."""

    def __init__(self, trainer: Trainer, served: Served, way: str, work: Path) -> None:
        self._trainer, self._served = trainer, served
        directory = work / way
        directory.mkdir(parents=True)
        settings = {"mode": "standby", "full_every": None, **WAYS[way]}
        sync = SyncSettings(
            bucket=_SMALL, pause="retract", seconds=120.0, directory=str(directory), **settings
        )
        self._overlaps = sync.overlaps
        here = Seat("here", None)
        wiring = Wiring(
            model_path=str(trainer.model),
            layout=trainer.layout,
            dtype=trainer.dtype,
            tp=served.tp,
            ep=1,
            device="cpu",
            trainer=tuple(trainer.run("seat")),
            engines=((here,) * served.tp,),
            sync=sync,
        )
        trainer.run("connect", wiring)
        inbox = make_inbox(wiring, 0, served.folder, "127.0.0.1")
        self.engine, self._side = 0, EngineSide(0, inbox, lambda: served.client)

    def phase(self, name: str, version: int, *args: Any) -> Future[PhaseReport]:
        """See ``EngineLink.phase``."""
        return in_background(name, partial(getattr(self._side, name), version, *args))

    def publish(self) -> str:
        """The trainer's weights to the server, at the first try; the digest it proved."""
        version = self._served.next_version()
        report = publish_to([self], self._trainer.send, version, overlaps=self._overlaps)
        assert not (report.mended or report.failed or report.behind), report
        assert self._served.client.model_info()["weight_version"] == str(version)
        assert report.bytes > 0
        return report.checksums[0]

    def close(self) -> None:
        """Give the engine's side back; the trainer's goes with its ranks or the next connection."""
        self._side.close()


def check_way(trainer: Trainer, served: Served, way: str, work: Path) -> None:
    """What is published is bit for bit the trainer's export loaded from disk, for two versions
    around memory that the trainer gave up; a version of the same weights changes nothing."""
    publishing = Publishing(trainer, served, way, work)
    seeds = itertools.count(served.next_version())
    try:
        trainer.learn(next(seeds))
        digest, answers = publishing.publish(), served.answers()
        assert publishing.publish() == digest == served.client.checksum()
        assert served.answers() == answers
        _check_disk_gives(trainer, served, work / f"{way}-first", digest, answers)
        trainer.run("switch_to_rollout")
        trainer.learn(next(seeds))
        trainer.run("switch_to_rollout")
        second, answers = publishing.publish(), served.answers()
        assert second == served.client.checksum() != digest
        _check_disk_gives(trainer, served, work / f"{way}-second", second, answers)
    finally:
        publishing.close()


def _check_disk_gives(
    trainer: Trainer, served: Served, folder: Path, digest: str, answers: Any
) -> None:
    """The server, after it loaded the trainer's export from disk over other weights."""
    served.client.pause()  # SGLang may still be at the end of what it has answered
    served.client.update_from_disk(trainer.model)
    assert served.client.checksum() != digest
    served.client.update_from_disk(trainer.export(folder))
    assert served.client.checksum() == digest
    served.client.continue_()
    assert served.answers() == answers
