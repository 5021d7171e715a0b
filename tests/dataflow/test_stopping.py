"""A run that loses a process ends with the cause first, and leaves no orphan."""

import contextlib
import re
import signal
import time

import psutil
import pytest

from hybridflow.monitor import read_events, read_metrics
from tests.dataflow.commands import DEADLINE, TrainCommand

pytestmark = pytest.mark.slow
DP2 = "roles.actor.parallel.dp=2"


@pytest.fixture
def running(recipe_file, tmp_path):
    """A long run that has made steps."""
    run = TrainCommand(recipe_file, DP2, "steps=2000", "checkpoint.every=3")
    folder = tmp_path / "run"
    run.wait_for("a checkpoint", lambda: bool(list(folder.glob("checkpoints/step-??????"))))
    run.wait_for("step of the main stage", lambda: len(read_metrics(folder)) > 3)
    yield run
    run.end()


def recorded(tmp_path) -> int:
    return len(read_metrics(tmp_path / "run"))


def kinds(folder) -> list[str]:
    return [event["kind"] for event in read_events(folder)]


def test_sigterm(running, tmp_path) -> None:
    before = recorded(tmp_path)
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 143, running.output
    assert not running.left_over()
    assert recorded(tmp_path) >= before


def test_sigterm_to_every_process(running) -> None:
    """As `timeout`, `scancel` and systemd send it: Ray must outlive the driver's orderly end."""
    begun = time.monotonic()
    for process in running.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    assert running.wait() == 143, running.output
    assert "ended by SIGTERM" in running.output and "GCS" not in running.output
    assert time.monotonic() - begun < 60, "Ray's own patience with a lost head"
    assert not running.left_over()


def test_a_killed_rollout_server_is_replaced(running, tmp_path) -> None:
    (server, *_) = running.processes("hybridflow.rollout.local")
    server.kill()
    folder = tmp_path / "run"
    running.wait_for("its return", lambda: "readmission" in kinds(folder))
    before = recorded(tmp_path)
    running.wait_for("more steps", lambda: recorded(tmp_path) > before + 3)
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 143, running.output
    assert not running.left_over()


def test_a_rollout_server_that_cannot_come_back(running, quickstart) -> None:
    weights = quickstart / "model.safetensors"
    weights.rename(aside := quickstart / "weights.aside")
    try:
        (server, *_) = running.processes("hybridflow.rollout.local")
        server.kill()
        assert running.wait() == 1
    finally:
        aside.rename(weights)
    assert "no rollout engine is left" in running.output, running.output
    assert re.search(r"rollout \((quarantined|lost)\): repair \d failed", running.output)
    assert "ended with status" in running.output and "Traceback" in running.output, "its log"
    assert not running.left_over()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_actor_rank(running, number) -> None:
    (rank, *_) = running.workers("actor")
    rank.send_signal(number)
    assert running.wait() == 1
    assert "actor rank" in running.output and "died" in running.output, running.output
    assert not running.left_over()


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.timeout(900))],
)
def test_a_lost_reward_worker_is_replaced(recipe_file, tmp_path, number) -> None:
    """Rewards are the same with and without: the workers keep nothing."""
    whole = TrainCommand(recipe_file, f"output={tmp_path}/whole", "steps=12")
    assert whole.wait() == 0, whole.output
    run = TrainCommand(
        recipe_file,
        "steps=12",
        *("roles.reward.sample_timeout_seconds=1", "roles.reward.timeout_seconds=10"),
        deadline=DEADLINE + 240,
    )
    run.wait_for("a step of the main stage", lambda: recorded(tmp_path) > 3)
    (worker, *_) = run.workers("reward")
    worker.send_signal(number)
    assert run.wait() == 0, run.output
    assert "repair" in kinds(tmp_path / "run"), run.output
    assert "the workers of 'reward' were started anew" in run.output
    rewards = [
        [row["metrics"].get("reward/mean") for row in read_metrics(tmp_path / name)]
        for name in ("whole", "run")
    ]
    assert rewards[0] == rewards[1]
    assert not run.left_over()


def test_a_killed_driver_leaves_nothing(running) -> None:
    running.process.kill()
    running.wait()
    assert not running.left_over(seconds=120)


def test_a_hanging_reward_ends_at_its_deadline(recipe_file, tmp_path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(
        "import time\n\ndef sleepy(prompt, response, answer, row):\n    time.sleep(3600)\n"
    )
    run = TrainCommand(
        recipe_file,
        f"roles.reward.function={path}:sleepy",
        "roles.reward.sample_timeout_seconds=2",
        "roles.reward.timeout_seconds=5",
        "warm_start=null",
    )
    assert run.wait() == 1
    assert "in sleepy" in run.output and "did not end within 2 s" in run.output, run.output
    assert not run.left_over()


def test_two_runs_beside_each_other(recipe_file, tmp_path) -> None:
    one = TrainCommand(recipe_file, f"output={tmp_path}/one")
    two = TrainCommand(recipe_file, f"output={tmp_path}/two")
    assert one.wait() == 0, one.output
    assert two.wait() == 0, two.output
    rewards = [
        [row["metrics"].get("reward/mean") for row in read_metrics(tmp_path / name)]
        for name in ("one", "two")
    ]
    assert rewards[0] == rewards[1]
