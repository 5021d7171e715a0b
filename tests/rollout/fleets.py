"""Fleets of real local engines in this process, and what a test does to their servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster import LocalSession
from hybridflow.recipe.axes import Axis
from hybridflow.rollout import Sampling, ServerConfig
from hybridflow.rollout.engines import FleetEvent
from hybridflow.rollout.fleet import Fleet
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_engine import RolloutEngine

GREEDY = Sampling(max_tokens=6, temperature=0.0)
SEEDED = Sampling(max_tokens=12, seed=11)
DEADLINE = 120.0


class LocalFleet:
    """Engines on one session, and a fleet of them whose events are kept."""

    def __init__(self, session: LocalSession, model: Path, names: Sequence[str], hang: float):
        config = ServerConfig("local", model, start_timeout=DEADLINE, request_timeout=DEADLINE)
        self.engines = [
            RolloutEngine(
                name,
                partial(
                    session.group,
                    name,
                    RolloutWorker,
                    1,
                    None,
                    {"server": config, "hang_seconds": hang},
                ),
                start_seconds=DEADLINE,
                request_seconds=DEADLINE,
            )
            for name in names
        ]
        self.events: list[FleetEvent] = []

    def fleet(
        self,
        repair: Callable[[RolloutEngine], int] | None = None,
        request_seconds: float = DEADLINE,
        version: int = 0,
    ) -> Fleet[RolloutEngine]:
        """A new fleet of the same engines; by default its repairs restart servers."""
        self.events.clear()
        return Fleet(
            self.engines,
            repair or restarted,
            request_seconds=request_seconds,
            repair_seconds=DEADLINE,
            on_event=self.events.append,
            version=version,
        )

    def server(self, index: int) -> psutil.Process:
        """The engine's server itself, beneath its supervisor."""
        (server,) = psutil.Process(self.engines[index].health().pid).children()
        return server


def restarted(engine: RolloutEngine) -> int:
    """A repair for servers that nothing was published to."""
    engine.restart()
    return 0


@contextmanager
def local_fleet(model: Path, count: int, hang: float = DEADLINE) -> Iterator[LocalFleet]:
    """``count`` engines that have started."""
    with LocalSession() as session:
        fleet = LocalFleet(session, model, [f"rollout-{i}" for i in range(count)], hang)
        for engine in fleet.engines:
            engine.wait_until_started()
        yield fleet


def prompts_of(count: int) -> Batch:
    """Prompts of different lengths; the first and the last are equal."""
    rows = [[2 + (index + step) % 90 for step in range(3 + index)] for index in range(count - 1)]
    rows = [*rows, rows[0]]
    data = Ragged.from_rows(rows, torch.int64)
    return Batch({"prompts": data}, {"prompts": Axis.PROMPTS}, prompts=count)


def wait_for(what: str, reached: Callable[[], bool]) -> None:
    """Poll until ``reached``; a failure after the deadline."""
    deadline = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < deadline, f"{what} was not seen within {DEADLINE:g} s"
        time.sleep(0.02)
