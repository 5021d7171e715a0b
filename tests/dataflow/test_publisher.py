"""A run's publisher: engines that fail in a publication come back, or go on where they may."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster import LocalSession
from hybridflow.dataflow.live_values import live_values
from hybridflow.dataflow.publisher import Publisher
from hybridflow.dataflow.state import SharedState
from hybridflow.dataflow.team import Team
from hybridflow.recipe.axes import Axis
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.schema import Recipe
from hybridflow.rollout import Sampling
from hybridflow.rollout.engines import EngineFault, FleetEvent
from tests.dataflow.conftest import recipe_of

NAMES = ("rollout-0", "rollout-1")


class Publishers:
    """One actor and two engines, and publishers to them by different recipes."""

    def __init__(self, quickstart: Path, folder: Path, session: LocalSession) -> None:
        self._recipe = recipe_of(quickstart, folder)
        self.events: list[FleetEvent] = []
        self.noted: list[int] = []
        plan = self._plan()
        told = (self.events.append, self.noted.append)
        self.team = Team(plan, session, plan.stages[0], *told, SharedState(live_values(plan)))
        assert self.team.publisher is not None
        self._publisher = self.team.publisher

    def _plan(self, staleness: int = 0, **sync: Any) -> Any:
        roles = {**self._recipe["roles"]}
        roles["rollout"] = {
            **roles["rollout"],
            "parallel": {"dp": 2},
            "max_staleness": staleness,
            "sync": sync,
        }
        return compile_recipe(Recipe.model_validate({**self._recipe, "roles": roles}))

    def connect(self, staleness: int = 0, **sync: Any) -> Publisher:
        """A publisher that has published, after whatever was published before."""
        version, engines = self._publisher.version, self._publisher.fleet.engines
        self._publisher.close()
        plan = self._plan(staleness, **sync)
        actor = self.team.groups["actor"]
        self._publisher = Publisher(plan, actor, engines, self.events.append, self.noted.append)
        self._publisher.version = self._publisher.fleet.version = version
        assert self._publisher.publish() == version + 1 == self.noted[-1]
        self.events.clear()
        return self._publisher

    def kinds(self) -> list[tuple[str, str]]:
        """What happened to which engine."""
        return [(event.kind, event.engine) for event in self.events]

    def versions(self) -> list[str | None]:
        """That servers show."""
        return [engine.health().version for engine in self._publisher.fleet.engines]


@pytest.fixture(scope="module")
def publishers(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publishers]:
    with LocalSession() as session:
        made = Publishers(quickstart, tmp_path_factory.mktemp("publisher"), session)
        yield made
        made._publisher.close()


def before(publisher: Publisher, phase: str, act: Callable[[], Any], *, times: int = 1) -> None:
    """Do something before the second engine's phase of that name."""
    link = publisher._links[NAMES[1]]
    run, left = link._phase, [act] * times

    def broken(name: str, version: int, *args: Any) -> Any:
        if name == phase and left:
            left.pop()()
        report = run(name, version, *args)
        if name == "open" and hasattr(report.result, "slots"):
            opened[:] = report.result.slots
        return report

    opened: list[str] = link.__dict__.setdefault("opened", [])
    link._phase = broken  # type: ignore[method-assign]


def kill(publisher: Publisher) -> None:
    """End the second engine's server with SIGKILL."""
    supervisor = psutil.Process(publisher.fleet.engines[1].health().pid)
    (server,) = supervisor.children()
    server.kill()
    psutil.wait_procs([server], 60)


def stop(publisher: Publisher) -> None:
    """Let the second engine's server hang."""
    (server,) = psutil.Process(publisher.fleet.engines[1].health().pid).children()
    server.suspend()


def spoil(publisher: Publisher) -> None:
    """Change a byte of the slot that the second engine opened."""
    (path,) = publisher._links[NAMES[1]].__dict__["opened"]
    with open(path, "r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))


def damage(publisher: Publisher, name: str) -> None:
    """Change a byte in the middle of a file of the version that is being published."""
    (path,) = publisher.shared.glob(f"v{publisher.version}/{name}")
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def answered(publisher: Publisher) -> set[int]:
    """Versions of the tokens that the fleet answers."""
    rows = Ragged.from_rows([[2 + number, 3, 5] for number in range(12)], torch.int64)
    prompts = Batch({"prompts": rows}, {"prompts": Axis.PROMPTS}, prompts=12)
    answer = publisher.fleet.generate(prompts, 2, Sampling(4, seed=3))
    return set(answer["token_versions"].values.tolist())


@pytest.mark.parametrize(
    ("mode", "phase"),
    [
        ("standby", "confirm"),
        ("bucketed", "load"),
        pytest.param("standby", "open", marks=pytest.mark.slow),
        pytest.param("standby", "prove", marks=pytest.mark.slow),
        pytest.param("standby", "resume", marks=pytest.mark.slow),
        pytest.param("bucketed", "confirm", marks=pytest.mark.slow),
        pytest.param("bucketed", "resume", marks=pytest.mark.slow),
    ],
)
def test_a_server_killed_in_a_publication_comes_back_with_its_version(
    publishers: Publishers, mode: str, phase: str
) -> None:
    publisher = publishers.connect(mode=mode)
    before(publisher, phase, lambda: kill(publisher))
    version = publisher.publish()
    assert publisher.last is not None and set(publisher.last.failed) == {1}
    assert publishers.kinds() == [
        (kind, NAMES[1]) for kind in ("quarantine", "repair", "readmission")
    ]
    assert "ended with status 137" in publishers.events[0].text
    assert publishers.versions() == [str(version)] * 2
    assert answered(publisher) == {version}
    assert publisher.publish() == version + 1
    assert not publisher.last.failed and publishers.versions() == [str(version + 1)] * 2


@pytest.mark.slow
def test_a_hanging_server_is_named_within_the_deadline_of_a_publication(
    publishers: Publishers,
) -> None:
    """Not that of a request, which is minutes; the first call that it left open is told."""
    publisher = publishers.connect(timeout_seconds=3)
    before(publisher, "confirm", lambda: stop(publisher))
    version = publisher.publish()
    assert [kind for kind, _ in publishers.kinds()] == ["quarantine", "repair", "readmission"]
    told = publishers.events[0].text
    assert re.search(r"pause_generation did not answer within 3 s.*the first: .*within 3 s", told)
    assert publishers.versions() == [str(version)] * 2
    assert answered(publisher) == {version}


@pytest.mark.slow
def test_a_worker_that_is_gone_is_started_anew(publishers: Publishers) -> None:
    publisher = publishers.connect()
    engine = publisher.fleet.engines[1]
    before(publisher, "prove", engine.close)
    version = publisher.publish()
    assert publishers.kinds() == [
        (kind, NAMES[1]) for kind in ("quarantine", "repair", "readmission")
    ]
    assert publishers.versions() == [str(version)] * 2
    assert answered(publisher) == {version}


def test_an_engine_that_is_behind_serves_as_long_as_the_recipe_allows(
    publishers: Publishers,
) -> None:
    publisher = publishers.connect(staleness=1)
    before(publisher, "prove", lambda: spoil(publisher), times=4)
    first = publisher.publish()
    assert publishers.kinds() == [("behind", NAMES[1])]
    assert f"goes on with version {first - 1}: prove: WeightMismatch" in publishers.events[0].text
    assert publishers.versions() == [str(first), str(first - 1)]
    assert answered(publisher) == {first, first - 1}

    second = publisher.publish()  # two behind would be too many
    assert [kind for kind, _ in publishers.kinds()[1:]] == ["quarantine", "repair", "readmission"]
    assert publishers.versions() == [str(second)] * 2
    assert answered(publisher) == {second}


@pytest.mark.parametrize(("full_every", "name"), [(None, "model.safetensors"), (4, "delta.json")])
def test_a_damaged_file_is_written_anew(
    publishers: Publishers, full_every: int | None, name: str
) -> None:
    """It never comes into a server: engines that read it say so before they load."""
    publisher = publishers.connect(transport="disk", full_every=full_every)
    before(publisher, "prove", lambda: damage(publisher, name))
    version = publisher.publish()
    assert publisher.last is not None and not (publisher.last.failed or publisher.last.behind)
    assert 1 in publisher.last.mended
    assert {kind for kind, _ in publishers.kinds()} == {"repair"}
    assert "at the second try: prove: " in publishers.events[0].text
    assert publishers.versions() == [str(version)] * 2
    assert answered(publisher) == {version}
    assert publisher.publish() == version + 1 and not publisher.last.mended


@pytest.mark.slow
def test_a_worker_that_lost_its_versions_gets_a_full_one(publishers: Publishers) -> None:
    publisher = publishers.connect(transport="disk", full_every=4)
    before(publisher, "load", publisher.fleet.engines[1].close)
    version = publisher.publish()
    assert [kind for kind, _ in publishers.kinds()] == ["quarantine", "repair", "readmission"]
    assert publishers.versions() == [str(version)] * 2
    assert publisher.publish() == version + 1
    assert publishers.versions() == [str(version + 1)] * 2


@pytest.mark.slow
def test_without_staleness_nobody_is_behind(publishers: Publishers) -> None:
    publisher = publishers.connect()
    before(publisher, "prove", lambda: spoil(publisher), times=2)
    version = publisher.publish()
    assert [kind for kind, _ in publishers.kinds()] == ["quarantine", "repair", "readmission"]
    assert publishers.versions() == [str(version)] * 2

    before(publisher, "prove", lambda: spoil(publisher))
    version = publisher.publish()
    assert publishers.kinds()[3:] == [("repair", NAMES[1])]
    assert "at the second try: prove: WeightMismatch" in publishers.events[3].text
    assert publishers.versions() == [str(version)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["standby", "bucketed"])
def test_a_repair_while_the_actor_is_ahead(publishers: Publishers, mode: str) -> None:
    """The served version is beside the engine, or else comes with the next publication: the
    actor's own weights are another's by then."""
    publisher = publishers.connect(mode=mode)
    version = publisher.version
    publisher.actor_moved()
    publisher.fleet.quarantine(NAMES[1], EngineFault("taken out by the test"))
    publisher.fleet.repair()
    if mode == "standby":
        assert publishers.versions() == [str(version)] * 2
    else:
        assert "takes part again with the next publication" in publishers.events[-1].text
    assert answered(publisher) == {version}
    assert publisher.publish() == version + 1
    assert publishers.versions() == [str(version + 1)] * 2
    assert answered(publisher) == {version + 1}


def test_shared_memory_that_is_too_small_is_told_whole_and_nothing_stays(
    publishers: Publishers, tmp_path: Path
) -> None:
    """What ``hybridflow check`` cannot see: other jobs fill the folder meanwhile."""
    publishers.connect().close()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for link in publishers._publisher._links.values():
            link.connect(publishers._publisher._wiring)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(ValueError, match="must be shown to hold") as caught:
            publishers.connect(directory=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "(one of 4 on this host, " in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert publishers.connect().version
