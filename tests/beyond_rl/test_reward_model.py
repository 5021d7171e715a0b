"""Reward models: pairs, margins, both heads, and a folder that transformers scores with."""

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from hybridflow.algorithms.losses.reward_model import METRICS, SCORE_LOSSES, bradley_terry
from hybridflow.batch import Ragged
from hybridflow.data import load_dataset
from hybridflow.dataflow.row_sizes import check_sizes
from hybridflow.recipe import catalogue
from hybridflow.recipe.checks import check
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe, read_draft
from hybridflow.recipe.rules import END, SCORED_AT
from hybridflow.workers.model import pooled
from tests.data.settings import Settings

ROLES = "roles={reward: {head: value, optimizer: {lr: 3.0e-3}, micro_batch_tokens: 60}}"


def test_by_hand_and_in_double_precision():
    scores_S = torch.tensor([1.0, -0.5, 2.0, 2.5], dtype=torch.float64, requires_grad=True)
    margins_N = torch.tensor([0.2, 0.0], dtype=torch.float64)
    found = bradley_terry(scores_S, margins_N)
    exact = [math.log(1 + math.exp(-(gap))) for gap in (1.5 - 0.2, -0.5)]
    assert found.loss_N.tolist() == pytest.approx(exact, rel=1e-12)
    found.loss_N.sum().backward()
    slopes = [-1 / (1 + math.exp(gap)) for gap in (1.3, -0.5)]
    wanted = [slopes[0], -slopes[0], slopes[1], -slopes[1]]
    assert scores_S.grad is not None and scores_S.grad.tolist() == pytest.approx(wanted)
    assert tuple(found.metrics) == METRICS
    assert found.metrics["reward_accuracy"].tolist() == [1.0, 0.0]
    assert set(SCORE_LOSSES) == set(catalogue.SCORE_LOSSES)


def held_out_pairs(assets: Path) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of the first seven held-out pairs, the chosen one first."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "plain")
    dataset = load_dataset(Settings(), tokenizer, assets / "eval.jsonl", ("prompts", "pairs"))
    rows = [dataset.row(index) for index in range(7)]
    return [(row.prompt_ids, ids) for row in rows for ids in (row.chosen_ids, row.rejected_ids)]


def assert_these(step: dict[str, float], scores_S: torch.Tensor) -> None:
    """The held-out metrics are those of transformers' scores."""
    exact = bradley_terry(scores_S)
    assert step["eval/loss"] == pytest.approx(exact.loss_N.mean().item(), rel=1e-4)
    for name, values in exact.metrics.items():
        assert step[f"eval/{name}"] == pytest.approx(values.mean().item(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("pad", ["its own", "the end"])
def test_it_learns_and_transformers_gives_the_same_scores(
    run_recipe, assets: Path, tmp_path: Path, pad: str
):
    """Where padding is the end token, transformers would take the end for padding."""
    base = tmp_path / "base"
    shutil.copytree(assets / "plain", base)
    config = json.loads((base / "config.json").read_text())
    if pad == "the end":
        config["pad_token_id"] = config["eos_token_id"]
    (base / "config.json").write_text(json.dumps(config))
    steps = run_recipe("reward_model", ROLES, f"model.path={base}", "steps=6")
    assert steps[-1]["eval/loss"] < math.log(2) and steps[-1]["eval/reward_accuracy"] > 0.5
    (folder,) = tmp_path.glob("run/export*")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert (model.config.pad_token_id is None) == (pad == "the end")
    assert getattr(model.config, SCORED_AT) == END  # as the function `reward_model` reads it
    with torch.no_grad():
        pairs = held_out_pairs(assets)
        scores = [model(torch.tensor([prompt + ids])).logits[0, 0] for prompt, ids in pairs]
    assert_these(steps[-1], torch.stack(scores))


def test_what_check_says(write_recipe):
    def faults(*overrides: str) -> list[str]:
        draft = read_draft(write_recipe("reward_model"), overrides)
        return [str(fault) for fault in draft.faults or check(load_recipe(path, overrides))]

    path = write_recipe("reward_model")
    assert faults(ROLES) == []
    found = faults()  # with an actor alone
    assert any("the role 'reward', which the recipe lacks" in fault for fault in found)
    (found,) = faults(ROLES, "roles.reward.optimizr={lr: 1.0e-3}")
    assert "`roles.reward.optimizr`" in found and "did you mean 'optimizer'" in found
    (found,) = faults(ROLES, "algorithm.critic_warmup_steps=2")
    assert "critic_warmup_steps does nothing: there is no actor" in found
    found = faults(ROLES, "roles.reward.optimizer=null")
    assert any("would update the role 'reward', which is frozen" in fault for fault in found)
    found = faults(ROLES, "dataflow=sft")
    assert any("the role 'actor', which the recipe lacks" in fault for fault in found)


def test_a_pair_must_fit_with_both_its_scores(write_recipe, assets: Path):
    tokenizer = AutoTokenizer.from_pretrained(assets / "plain")
    dataset = load_dataset(Settings(), tokenizer, assets / "train.jsonl", ("prompts", "pairs"))
    rows = [dataset.row(index) for index in range(len(dataset))]
    sizes = [2 * len(r.prompt_ids) + len(r.chosen_ids) + len(r.rejected_ids) - 2 for r in rows]
    tokens = max(sizes)  # of both responses but their last tokens, each with its prompt
    assert dataset.longest() == (sizes.index(tokens), tokens)
    for room, fits in ((tokens + 1, False), (tokens + 2, True)):
        told = (ROLES, f"roles.reward.micro_batch_tokens={room}")
        plan = compile_recipe(load_recipe(write_recipe("reward_model"), told))
        with nullcontext() if fits else pytest.raises(ValueError, match=f"has {tokens + 2} tokens"):
            check_sizes(plan, plan.stages[0], dataset)


BY_TOKEN = """
inputs: [prompts, pairs, margins, eval_prompts, eval_pairs]
nodes:
  update:
    role: reward
    call: update
    in: [prompts, {responses: pairs}, margins]
    loss: bradley_terry_token
  held_out:
    role: reward
    call: evaluate
    in: [{prompts: eval_prompts}, {responses: eval_pairs}]
    loss: bradley_terry_token
    after: [update]
    every: evaluation
"""


def test_a_score_of_every_token_and_margins(run_recipe, assets: Path, tmp_path: Path):
    path = tmp_path / "token.yaml"
    path.write_text(BY_TOKEN)
    overrides = (f"dataflow={path}", "steps=6", "data.prompts_per_step=24")
    steps = run_recipe("reward_model", ROLES, *overrides)
    assert steps[-1]["update/loss"] < steps[0]["update/loss"]
    assert all(step["throughput/tokens_per_second"] > 0 for step in steps)
    assert all(step["throughput/update_tflops"] > 0 for step in steps)
    (folder,) = tmp_path.glob("run/export*")
    model = AutoModelForTokenClassification.from_pretrained(folder)
    with torch.no_grad():
        pairs = held_out_pairs(assets)
        scores = [model(torch.tensor([p + ids])).logits[0, len(p) :, 0].mean() for p, ids in pairs]
    assert_these(steps[-1], torch.stack(scores))


def test_scores_of_values():
    values = Ragged.from_rows([[9.0, 1.0, 3.0], [9.0, 5.0]])
    responses = Ragged.from_rows([[7, 8], [8]])
    assert pooled(values, "last", responses).tolist() == [3, 5]
    assert pooled(values, "mean", responses).tolist() == [2, 5]
    assert pooled(values, "before_padding", responses, None).tolist() == [3, 5]
    assert pooled(values, "before_padding", responses, 8).tolist() == [1, 9]


@pytest.mark.parametrize("pad", [0, 1, None])
def test_scores_before_padding_are_transformers(assets: Path, pad: int | None):
    """The end of a sequence has the id 1; a response may be cut off before it."""
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(assets / "plain", num_labels=1)
    model.config.pad_token_id = pad
    prompts, rows = [[5, 6, 7], [9], [4, 8]], [[11, 12, 1], [13], [1]]
    with torch.no_grad():
        theirs = [
            model(torch.tensor([p + r])).logits[0, 0].item()
            for p, r in zip(prompts, rows, strict=True)
        ]
        values = [
            model.score(model.model(torch.tensor([p + r])).last_hidden_state)[0, len(p) - 1 :, 0]
            for p, r in zip(prompts, rows, strict=True)
        ]
    found = pooled(Ragged.from_rows(values), "before_padding", Ragged.from_rows(rows), pad)
    assert found.tolist() == pytest.approx(theirs, rel=1e-5)
