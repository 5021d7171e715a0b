"""Runs over two rollout engines: the samples of one, also when a server dies on the way."""

import signal
import time

import pytest

from hybridflow.cluster import LocalSession
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.monitor import read_events, read_metrics, read_rollouts
from hybridflow.recipe.compile import compile_recipe
from tests.dataflow.commands import TrainCommand

DP2 = "roles.rollout.parallel.dp=2"
REWARD = """
import pathlib
import psutil

def servers(above):
    below = above.children(recursive=True)
    return [p for p in below if p.cmdline()[1:3] == ["-m", "hybridflow.rollout.local"]]

def deadly(prompt, response, answer, row):
    flag = pathlib.Path(__file__).with_name("killed")
    if {kill} and not flag.exists():
        flag.touch()
        # Scorers are processes of their own: the servers are children of one further up.
        found = (servers(above) for above in psutil.Process().parents())
        server = next(filter(None, found))[1]
        server.kill()
        server.wait(60)
    return sum(map(ord, response)) % 7
"""


def run(make_recipe, folder, *overrides: str, kill: bool = False):
    """Two steps without warm start; the reward kills a server while it scores the first."""
    folder.mkdir()
    reward = folder / "reward.py"
    reward.write_text(REWARD.format(kill=kill))
    recipe = make_recipe(
        f"output={folder}/run",
        f"roles.reward.function={reward}:deadly",
        "warm_start=null",
        "steps=2",
        "evaluation=null",
        "checkpoint.every=null",
        "export=false",
        *overrides,
    )
    return train(compile_recipe(recipe), lambda logs: LocalSession(), LaunchOptions(live=False))


def sampled(folder) -> list[dict]:
    return list(read_rollouts(folder))


def test_a_server_that_dies_changes_no_sample(make_recipe, tmp_path) -> None:
    """Samples draw by their place in the step, so neither the number of engines nor a repair
    between two steps changes them."""
    alone = run(make_recipe, tmp_path / "alone")
    killed = run(make_recipe, tmp_path / "killed", DP2, kill=True)
    assert sampled(killed) == sampled(alone)
    assert len(sampled(killed)) == 2 * 6 * 4
    kinds = [e["kind"] for e in read_events(killed) if e.get("engine") is not None]
    assert kinds == ["quarantine", "repair", "readmission"]


def settled(folder) -> int:
    """The number of steps once there has been no further one for two seconds."""
    steps = -1
    while steps != (steps := len(read_metrics(folder))):
        time.sleep(2.0)
    return steps


@pytest.mark.slow
def test_on_ray_a_server_killed_while_it_answers(recipe_file, tmp_path) -> None:
    folder = tmp_path / "run"
    run = TrainCommand(recipe_file, DP2, "steps=2000", "checkpoint.every=3")
    run.wait_for("steps of the main stage", lambda: len(read_metrics(folder)) > 3)
    assert {len(run.workers(f"rollout-{i}")) for i in range(2)} == {1}, "a group for each engine"

    def events(kind: str) -> list[dict]:
        return [event for event in read_events(folder) if event["kind"] == kind]

    for turn in range(1, 3):
        found = run.processes("hybridflow.rollout.local")
        server = next(p for p in found if "supervise" not in " ".join(p.cmdline()))
        server.send_signal(signal.SIGSTOP)
        before = settled(folder)  # the run waits for the server: it dies with a request in hand
        server.kill()
        run.wait_for("its return", lambda turn=turn: len(events("readmission")) == turn)
        run.wait_for("more steps", lambda before=before: len(read_metrics(folder)) > before + 4)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output
    assert not run.left_over()
    assert len(events("quarantine")) == 2
    steps = [(row["step"], row["evaluation"]) for row in read_rollouts(folder)]
    trained = [step for step, evaluation in steps if not evaluation]
    assert all(trained.count(step) == 6 * 4 for step in set(trained)), "no sample lost or doubled"
