"""`hybridflow train` of a model with experts, spread over the ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hybridflow.assets.quickstart import EOS, VOCABULARY, character_tokenizer
from hybridflow.cluster import LocalSession
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.monitor import read_metrics, read_rollouts
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe
from tests.dataflow.commands import TrainCommand
from tests.dataflow.conftest import recipe_of

GRAPH = {
    "inputs": ["prompts", "targets"],
    "nodes": {
        "update": {
            "role": "actor",
            "call": "update",
            "in": ["prompts", {"responses": "targets"}],
            "loss": "cross_entropy",
        },
        "save": {"role": "actor", "call": "save", "after": ["update"], "every": "checkpoint"},
    },
}
VARIED = """
def varied(prompt, response, answer, row):
    return sum(map(ord, response)) % 7
"""


def make_model(folder: Path) -> None:
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        eos_token_id=VOCABULARY.index(EOS),
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_supervised_steps_over_spread_experts(quickstart: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(model)
    folder = tmp_path / "run"
    recipe = {
        "name": "experts",
        "output": str(folder),
        "model": {"path": str(model)},
        "cluster": {"devices_per_node": 2},
        "data": {
            "train": str(quickstart / "train.jsonl"),
            "max_prompt_tokens": 16,
            "prompts_per_step": 8,
        },
        "steps": 4,
        "roles": {
            "actor": {"parallel": {"dp": 2, "ep": 2}, "optimizer": {"lr": 1e-3}},
            "rollout": {"sampling": {"max_tokens": 5}},
        },
        "dataflow": GRAPH,
        "checkpoint": {"every": 2},
    }
    path = tmp_path / "experts.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    run = TrainCommand(path)
    assert run.wait() == 0, run.output
    assert not run.left_over()
    saved = {file.name for file in (folder / "checkpoints").glob("step-000004/**/*.safetensors")}
    assert {"etp0_ep0_pp0.safetensors", "etp0_ep1_pp0.safetensors"} < saved

    first = AutoModelForCausalLM.from_pretrained(folder / "export").state_dict()
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    shutil.rmtree(folder / "export")
    resumed = TrainCommand(path, "--resume")
    assert resumed.wait() == 0, resumed.output
    again = AutoModelForCausalLM.from_pretrained(folder / "export").state_dict()
    for name, weight in first.items():
        assert torch.equal(again[name], weight), name

    one = f"output={tmp_path}/single"
    single = compile_recipe(load_recipe(path, ["roles.actor.parallel={}", one]))
    train(single, lambda logs: LocalSession(), LaunchOptions(live=False))
    for ours, theirs in zip(read_metrics(folder), read_metrics(tmp_path / "single"), strict=True):
        for name in ("update/loss", "update/grad_norm"):
            assert ours["metrics"][name] == pytest.approx(theirs["metrics"][name], rel=1e-5)
    exported, expected = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "export").state_dict()
        for name in ("run", "single")
    )
    for name, weight in expected.items():
        # Adam's first steps are as long as the rate where a gradient is but rounding.
        torch.testing.assert_close(exported[name], weight, rtol=1e-4, atol=1e-4)


def experts_recipe(assets: Path, tmp_path: Path) -> Path:
    """The tiny GRPO recipe over a model with experts, with rewards that differ within a group."""
    model, reward = tmp_path / "model", tmp_path / "reward.py"
    make_model(model)
    reward.write_text(VARIED)
    recipe: dict[str, Any] = recipe_of(assets, tmp_path / "run")
    recipe["model"] = {"path": str(model)}
    recipe["roles"]["reward"] = {"function": f"{reward}:varied"}
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def check_samples_are_of_the_proven_weights(folder: Path) -> None:
    """Each step's version was proven, and trainer and server agree about every token."""
    rows = list(read_metrics(folder))
    steps = [row["metrics"] for row in rows if row["stage"] == "main"]
    assert [step["weights/version"] for step in steps] == [2, 3, 4]
    for step in steps:
        assert step["update/staleness_max"] == 0
        assert step["update/rollout_gap_max"] < 1e-4
        assert step["update/grad_norm"] > 0
        assert step["publish/verify_seconds"] > 0
    assert {row["version"] for row in read_rollouts(folder)} == {1, 2, 3, 4}


def test_grpo_with_experts(quickstart: Path, tmp_path: Path) -> None:
    recipe = compile_recipe(load_recipe(experts_recipe(quickstart, tmp_path), []))
    train(recipe, lambda logs: LocalSession(), LaunchOptions(live=False))
    check_samples_are_of_the_proven_weights(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["local", pytest.param("sglang", marks=pytest.mark.sglang)])
@pytest.mark.parametrize("mode", ["standby", "bucketed"])
def test_grpo_with_experts_spread_over_the_actors_ranks(
    quickstart: Path, tmp_path: Path, engine: str, mode: str
) -> None:
    run = TrainCommand(
        experts_recipe(quickstart, tmp_path),
        "roles.actor.parallel={dp: 2, ep: 2}",
        f"roles.rollout.engine={engine}",
        f"roles.rollout.sync={{mode: {mode}, bucket: 40KiB}}",
        "roles.rollout.start_timeout_seconds=400",
        deadline=800,
    )
    assert run.wait() == 0, run.output
    assert not run.left_over()
    check_samples_are_of_the_proven_weights(tmp_path / "run")
