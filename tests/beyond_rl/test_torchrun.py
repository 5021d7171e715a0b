"""Runs under plain torchrun: the numbers of one process, resuming, and how a failed job ends."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.monitor import read_events, read_metrics
from tests.beyond_rl.conftest import recipe_of
from tests.dataflow.commands import TrainCommand

DEADLINE = 240.0
REFERENCE = {"colocate": "actor"}


class Job:
    """A job of two ranks of torchrun over a recipe's file."""

    def __init__(self, recipe: Path, *arguments: str, ranks: int = 2) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "hybridflow", "train", str(recipe)]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK"))}
        self.done = subprocess.run(
            [*command, "--plain", *arguments],
            env=kept,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    @property
    def output(self) -> str:
        return self.done.stdout + self.done.stderr


@pytest.fixture
def recipe(assets: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a recipe of two data-parallel ranks."""

    def write(dataflow: str, **changes: object) -> Path:
        told: dict[str, Any] = recipe_of(assets, tmp_path / "ranks", dataflow) | changes
        told["roles"]["actor"]["parallel"] = {"dp": 2}
        if dataflow == "dpo":
            told["roles"]["reference"] = REFERENCE
        path = tmp_path / f"{dataflow}-ranks.yaml"
        path.write_text(yaml.safe_dump(told))
        return path

    return write


def measured(folder: Path) -> list[dict[str, float]]:
    clock = ("seconds", "throughput/", "memory/")
    return [
        {k: v for k, v in row["metrics"].items() if not any(part in k for part in clock)}
        for row in read_metrics(folder)
    ]


def assert_same(folder: Path, alone: list[dict[str, float]]) -> None:
    """Sums in another order change the last digits alone."""
    together = measured(folder)
    assert len(alone) == len(together) == 3
    for ours, theirs in zip(together, alone, strict=True):
        wanted = {name: theirs[name] for name in ours}
        assert ours == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_two_ranks_give_what_one_process_gives(recipe, run_recipe, tmp_path: Path):
    job = Job(recipe("dpo"))
    assert job.done.returncode == 0, job.output
    assert job.output.count("main 1/3") == 1, "rank 0 alone reports"
    assert (tmp_path / "ranks/export/model.safetensors").is_file()
    assert_same(tmp_path / "ranks", run_recipe("dpo", "roles.reference={colocate: actor}"))


def test_a_job_samples_and_is_taught_without_ray(
    recipe, run_recipe, assets, other_model, tmp_path: Path
):
    """The server and what scores live beside rank 0; weights go to it from both ranks."""
    sizes = {"prompts_per_step": 8, "samples_per_prompt": 4, "max_prompt_tokens": 32}
    sizes["train"] = str(assets / "train.jsonl")
    roles = {
        "actor": {"optimizer": {"lr": 1e-3}},
        "teacher": {"head": "vocabulary", "model": str(other_model), **REFERENCE},
        "rollout": {"sampling": {"max_tokens": 5}},
    }
    alone = run_recipe(
        "distill",
        *(f"data.{name}={value}" for name, value in sizes.items()),
        *(f"roles.{name}={value}" for name, value in roles.items()),
        *("evaluation=null", "data.eval=null", "steps=2"),
    )
    told = {"data": sizes, "roles": roles, "evaluation": None, "control": {}, "steps": 2}
    told["cluster"] = {"devices_per_node": 3}
    job = Job(recipe("distill", **told))
    assert job.done.returncode == 0, job.output
    first, second = measured(tmp_path / "ranks")
    # Of the same samples; later ones may differ where sums in another order tip a draw.
    assert first == pytest.approx({name: alone[0][name] for name in first}, rel=1e-4, abs=1e-6)
    assert second["weights/version"] == 2 and second["update/rollout_gap_max"] < 1e-4


@pytest.mark.slow
def test_two_ranks_go_on_from_a_checkpoint(recipe, run_recipe, tmp_path: Path):
    path = recipe("sft", steps=2, checkpoint={"every": 1})
    for arguments in ([], ["--resume", "steps=3"]):
        job = Job(path, *arguments)
        assert job.done.returncode == 0, job.output
    assert_same(tmp_path / "ranks", run_recipe("sft"))


@pytest.mark.slow
def test_ray_gives_the_same(recipe, run_recipe, tmp_path: Path):
    run = TrainCommand(recipe("sft"))
    assert run.wait() == 0, run.output
    assert_same(tmp_path / "ranks", run_recipe("sft"))


@pytest.mark.slow
def test_a_run_that_fails_is_reported_by_rank_0(recipe, tmp_path: Path):
    """A learning rate that blows the weights up fails on every rank alike."""
    job = Job(recipe("sft"), "roles.actor.optimizer={lr: 1e30, clip_grad: 0}")
    assert job.done.returncode == 1
    errors = [e["text"] for e in read_events(tmp_path / "ranks") if e["kind"] == "error"]
    assert len(errors) == 1 and "FloatingPointError in update" in errors[0], job.output


@pytest.mark.slow
def test_what_torchrun_cannot_run_is_said_once(recipe, tmp_path: Path):
    job = Job(recipe("sft"), "roles.actor.parallel.dp=1", ranks=2)
    assert job.done.returncode == 1
    assert job.output.count("the recipe's layout has 1 ranks, torchrun has started 2") == 1
    assert not (tmp_path / "ranks").exists()
