"""Runs on Ray that lose a process as weights are published: no orphan, no rest, and they go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hybridflow.cluster import CallTimeout, RaySession, processes
from hybridflow.dataflow.live_values import live_values
from hybridflow.dataflow.state import SharedState
from hybridflow.dataflow.team import Team
from hybridflow.monitor import read_events, read_metrics
from hybridflow.recipe.compile import compile_recipe
from hybridflow.workers.rollout_engine import GRACE_SECONDS
from tests.dataflow.commands import TrainCommand
from tests.dataflow.conftest import MakeRecipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SYNC = "roles.rollout.sync"
DP2 = ("roles.actor.parallel.dp=2", "roles.rollout.parallel.dp=2", "cluster.devices_per_node=4")

VARIED = "def varied(prompt, response, answer, row):\n    return sum(map(ord, response)) % 7\n"
"""A reward that differs between samples, so that every step moves the weights."""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Where this test's runs share memory, and nothing else does."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (tmp_path / "varied.py").write_text(VARIED)
    return folder


def start(recipe: Path, shared: Path, *arguments: str) -> TrainCommand:
    sync = f"roles.rollout.sync.directory={shared}"
    reward = f"roles.reward.function={shared.parent / 'varied.py'}:varied"
    own = (sync, reward, "steps=2000", "checkpoint.every=2")
    return TrainCommand(recipe, *DP2, *own, *arguments)


def steps(folder: Path) -> int:
    return len(read_metrics(folder))


def version(folder: Path) -> int:
    """The newest that the run has published."""
    found = (row["metrics"].get("weights/version") for row in read_metrics(folder))
    return int(max((number for number in found if number is not None), default=0))


@pytest.fixture
def running(recipe_file: Path, shared: Path, tmp_path: Path) -> Iterator[TrainCommand]:
    """A run that publishes and has a checkpoint."""
    run = start(recipe_file, shared)
    folder = tmp_path / "run"
    run.wait_for("a checkpoint", lambda: bool(list(folder.glob("checkpoints/step-??????"))))
    run.wait_for("publications", lambda: version(folder) > 3)
    yield run
    run.end()


def goes_on(recipe: Path, shared: Path, folder: Path) -> None:
    """``--resume`` publishes higher versions, leaves what others left behind to nobody, and ends
    when it is told to."""
    before, reached = steps(folder), version(folder)
    run = start(recipe, shared, "--resume")
    try:
        run.wait_for("more steps", lambda: steps(folder) > before + 2)
        run.wait_for("a later version", lambda: version(folder) > reached)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143, run.output
        assert not run.left_over()
    finally:
        run.end()
    assert not list(shared.iterdir())
    versions = [row["metrics"].get("weights/version", 0) for row in read_metrics(folder)]
    resumed = [row for row in versions[before:] if row]
    assert resumed == sorted(resumed)


def test_a_trainer_rank_killed(running, recipe_file, shared, tmp_path) -> None:
    folder = tmp_path / "run"
    rank = running.workers("actor")[-1]
    rank.kill()
    assert running.wait() == 1
    assert "actor rank" in running.output and "died" in running.output, running.output
    errors = [event["text"] for event in read_events(folder) if event["kind"] == "error"]
    assert "actor rank" in errors[-1] and "died" in errors[-1]
    assert not running.left_over()
    goes_on(recipe_file, shared, folder)


def test_a_trainer_rank_that_stands_still(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """It is given three waits of the recipe's deadline and a grace; then its group is ended, and
    the error names the call and the rank. Servers keep the version that they hold."""
    plan = compile_recipe(make_recipe("roles.actor.parallel.dp=2", f"{SYNC}.timeout_seconds=2"))
    state = SharedState(live_values(plan))
    with RaySession(1, plan.devices, log_dir=tmp_path / "logs") as session:
        team = Team(plan, session, plan.stages[0], lambda event: None, lambda version: None, state)
        with closing(team):
            assert team.publish() == 1
            ranks = processes.marked(f"{session.mark}actor/")
            assert len(ranks) == 2
            ranks[1].suspend()
            want = rf"actor: no answer to send within {3 * 2 + GRACE_SECONDS:g} s from rank [01]$"
            with pytest.raises(CallTimeout, match=want):
                team.publish()
            assert processes.marked(f"{session.mark}actor/") == []
            (engine,) = team.rollout.engines
            assert engine.health().version == "1"


def test_the_driver_killed_as_it_publishes(running, recipe_file, shared, tmp_path) -> None:
    """Slots stay behind in shared memory, and the next run's start removes them."""
    (slot, *_) = shared.glob("*/engine0-rank0-a.slot")
    before = slot.read_bytes()
    deadline = time.monotonic() + 120
    while slot.read_bytes() == before:  # until a rank of the trainer writes
        assert time.monotonic() < deadline
        time.sleep(0.001)
    running.process.kill()
    running.wait()
    assert not running.left_over(seconds=120)
    goes_on(recipe_file, shared, tmp_path / "run")
