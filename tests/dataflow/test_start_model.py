"""After a warm start, references and further models begin where the policy does."""

import math
import shutil
from pathlib import Path
from typing import Literal

import pytest
import yaml

from hybridflow.cluster import LocalSession
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.dataflow.start_model import followers
from hybridflow.monitor import read_metrics
from hybridflow.recipe.checks import check
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe

REFERENCE = {"colocate": "actor"}


def run(recipe, resume: bool | Literal["if any"] = False) -> tuple[Path, list[dict[str, float]]]:
    """The folder, and the metrics of the main stage's steps."""
    assert check(recipe) == []
    options = LaunchOptions(live=False, resume=resume)
    folder = train(compile_recipe(recipe), lambda logs: LocalSession(), options)
    rows = [row for row in read_metrics(folder) if row["stage"] == "main"]
    clock = ("seconds", "throughput/", "weights/", "publish/")
    return folder, [
        {k: v for k, v in row["metrics"].items() if not any(part in k for part in clock)}
        for row in rows
    ]


def preference_recipe(quickstart: Path, output: Path, dataflow: str) -> Path:
    recipe = {
        "name": "tiny",
        "output": str(output),
        "model": {"path": str(quickstart)},
        "cluster": {"devices_per_node": 1},
        "data": {"train": str(quickstart / "pairs.jsonl"), "prompts_per_step": 6},
        "warm_start": {
            "train": str(quickstart / "train.jsonl"),
            "steps": 3,
            "prompts_per_step": 16,
            "lr": 3e-3,
        },
        "steps": 2,
        "roles": {"actor": {"optimizer": {"lr": 1e-3}}, "reference": REFERENCE},
        "dataflow": dataflow,
        "checkpoint": {"every": 1},
        "export": False,
    }
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_the_reference_of_a_preference_is_the_supervised_model(quickstart, tmp_path) -> None:
    recipe = load_recipe(preference_recipe(quickstart, tmp_path / "run", "dpo"))
    folder, steps = run(recipe, resume="if any")
    assert steps[0]["update/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0]["update/reward_margin"] == pytest.approx(0, abs=1e-5)
    assert abs(steps[1]["update/reward_margin"]) > 1e-4
    shutil.rmtree(folder / "checkpoints" / "step-000005")  # as if killed before it
    assert run(recipe, resume="if any")[1] == steps, "a resumed run has the same reference"
    assert not folder.with_name("run.1").exists(), "it went on in the folder that was there"
    shutil.rmtree(folder / "checkpoints" / "step-000005")
    shutil.rmtree(folder / "start_model")
    with pytest.raises(ValueError, match="start_model is gone.*stage 'main'.*reference must hold"):
        run(recipe, resume=True)


def test_who_begins_where_the_policy_does(make_recipe, quickstart) -> None:
    told = ["dataflow=prime", "roles.reference={colocate: actor}", "evaluation=null"]
    told += ["roles.prm={head: vocabulary, optimizer: {lr: 1e-3}, colocate: actor}"]
    assert followers(compile_recipe(make_recipe(*told)), 1) == ["reference", "prm"]
    assert followers(compile_recipe(make_recipe(*told)), 0) == []
    assert followers(compile_recipe(make_recipe(*told, "warm_start=null")), 0) == []
    own = compile_recipe(make_recipe(*told, f"roles.reference.model={quickstart}"))
    assert followers(own, 1) == ["prm"] and own.recipe.model_path("reference") == str(quickstart)


@pytest.mark.parametrize("estimator", ["k3", pytest.param("full", marks=pytest.mark.slow)])
def test_the_kl_of_a_policy_starts_at_zero(make_recipe, tmp_path, estimator: str) -> None:
    """Of sampled tokens, and over the vocabulary, where the actor keeps the reference's head."""
    scorer = tmp_path / "varied.py"
    scorer.write_text(
        "def varied(prompt, response, answer, row):\n    return sum(map(ord, response)) % 7\n"
    )
    recipe = make_recipe(
        f"roles.reward.function={scorer}:varied",
        f"algorithm.kl={{coef: 0.1, estimator: {estimator}}}",
        "roles.reference={colocate: actor}",
        f"dataflow={'grpo' if estimator == 'k3' else 'grpo_full_kl'}",
        *("evaluation=null", "checkpoint.every=1", "export=false", "warm_start.lr=1e-2"),
        *("roles.actor.optimizer.lr=1e-2", "steps=2"),
    )
    folder, steps = run(recipe)
    assert steps[0]["update/kl"] == pytest.approx(0, abs=1e-9)
    assert steps[1]["update/kl"] > 1e-6
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    assert run(recipe, resume=True)[1] == steps


@pytest.mark.slow
def test_a_process_reward_model_starts_there_too(make_recipe) -> None:
    recipe = make_recipe(
        "dataflow=prime",
        "roles.reference={colocate: actor}",
        "roles.prm={head: vocabulary, optimizer: {lr: 1e-3}, colocate: actor}",
        *("evaluation=null", "checkpoint.every=null", "export=false", "steps=1"),
    )
    _, (first,) = run(recipe)
    assert first["prm/loss"] == pytest.approx(math.log(2), abs=1e-6)
