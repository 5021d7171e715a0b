"""Supervised fine-tuning, whole runs: conversations, held-out loss, and a model that loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.data import load_dataset
from hybridflow.recipe.checks import check
from hybridflow.recipe.load import load_recipe


def test_conversations_train_the_assistants_tokens(run_recipe, assets: Path, tmp_path: Path):
    chat = (f"model.path={assets}/model", "data.messages_column=messages")
    steps = run_recipe("sft", *chat, "steps=4", "checkpoint.every=2")
    losses = [step["eval/loss"] for step in steps if "eval/loss" in step]
    assert len(losses) == 2 and losses[-1] < losses[0], "held-out rows every second step"
    assert all(step["update/grad_norm"] > 0 for step in steps)
    assert (tmp_path / "run/checkpoints/step-000004").is_dir()
    held_out = mean_loss(tmp_path / "run/export", assets, rows=7)
    assert losses[-1] == pytest.approx(held_out, rel=1e-5), "of the model as it was exported"


def mean_loss(model_path: Path, assets: Path, rows: int) -> float:
    """Of the assistant's tokens under transformers, one conversation after the other."""
    recipe_tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    model = AutoModelForCausalLM.from_pretrained(model_path)
    losses = []
    for row in conversations(recipe_tokenizer, assets, rows):
        ids = torch.tensor([*row.prompt_ids, *row.answer_ids])
        logits = model(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1].detach().double()
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(row.answer_ids)[:, None])[:, 0]
        losses.append(-logprobs[torch.tensor(row.answer_mask)])
    return torch.cat(losses).mean().item()


def conversations(tokenizer, assets: Path, rows: int):
    from tests.data.settings import Settings

    settings = Settings(messages_column="messages")
    inputs = ("prompts", "targets", "target_mask")
    dataset = load_dataset(settings, tokenizer, assets / "eval.jsonl", inputs)
    return [dataset.row(index) for index in range(rows)]


def test_other_rows_than_those_of_the_checkpoint_are_refused(run_recipe, assets, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    lines = (assets / "train.jsonl").read_text().splitlines(keepends=True)
    path.write_text("".join(lines))
    told = (f"data.train={path}", "checkpoint.every=1", "evaluation=null", "export=false")
    run_recipe("sft", *told, "steps=1")
    path.write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match="rows.jsonl has 23 rows, and had 24 when the run began"):
        run_recipe("sft", *told, "steps=2", resume=True)
    path.write_text("".join(lines))
    assert len(run_recipe("sft", *told, "steps=2", resume=True)) == 2


def test_prompts_and_answers_need_no_rollout(run_recipe):
    steps = run_recipe("sft", "evaluation=null")
    assert all(step["update/loss"] > 0 for step in steps)


def test_what_check_says(write_recipe, assets: Path):
    def faults(*overrides: str) -> list[str]:
        return [str(fault) for fault in check(load_recipe(write_recipe("sft"), overrides))]

    (found,) = faults("data.messages_column=talks", "data.eval=null", "evaluation=null")
    assert (
        f"{assets}/train.jsonl has no column 'talks'" in found and "data.messages_column" in found
    )
    assert "answer, chosen" in found or "did you mean" in found, "the columns that there are"
    found = faults("dataflow=grpo")
    assert any("acts on the role 'rollout', which the recipe lacks" in fault for fault in found)
    (found,) = faults("data.samples_per_prompt=2")
    assert "of which the data has 1 for a prompt" in found


def short_model(folder: Path, assets: Path) -> Path:
    """The tiny model as one that was made for 8 tokens."""
    short = folder / "short"
    shutil.copytree(assets / "plain", short)
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 8}
    (short / "config.json").write_text(json.dumps(config))
    return short


def test_rows_that_fit_nothing_are_found_before_the_first_step(run_recipe, assets, tmp_path: Path):
    with pytest.raises(ValueError, match=r"train.jsonl:\d+: the row has .* data.max_tokens"):
        run_recipe("sft", "roles.actor.micro_batch_tokens=7", "evaluation=null")
    with pytest.raises(ValueError, match=r"\d+ tokens, and .* has 8 positions .*data.max_tokens=8"):
        run_recipe("sft", f"model.path={short_model(tmp_path, assets)}", "evaluation=null")
    (step,) = run_recipe(
        "sft",
        *("roles.actor.micro_batch_tokens=7", "evaluation=null", "data.max_tokens=8"),
        *("data.prompts_per_step=1", "steps=1"),
    )
    assert step["update/tokens"] <= 3
