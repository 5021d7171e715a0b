"""Pairs and labels, whole runs on the tiny model, and what `check` says of their recipes."""

import json
import math

import pytest

from hybridflow.recipe.activate import SHIPPED
from hybridflow.recipe.checks import check
from hybridflow.recipe.load import load_recipe

REFERENCE = "roles.reference={colocate: actor}"
PREFERENCES = {
    "dpo": [REFERENCE],
    "ipo": [REFERENCE],
    "orpo": ["algorithm.preference.odds_weight=0.5"],
    "simpo": ["algorithm.preference={beta: 2.0, target_margin: 1.0}"],
    "kto": [REFERENCE, "data.prompts_per_step=24"],
}
QUICK = ("dpo", "kto")  # with a reference and held-out pairs; with labels and a baseline


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PREFERENCES]
)
def test_a_few_steps_prefer_the_chosen(run_recipe, name: str):
    steps = run_recipe(name, *PREFERENCES[name], "roles.actor.optimizer.lr=3e-3", "steps=4")
    assert all(step["update/grad_norm"] > 0 for step in steps)
    first, last = steps[0], steps[-1]
    if name == "dpo":
        assert first["update/loss"] == pytest.approx(math.log(2)), "policy and reference alike"
        assert first["update/reward_accuracy"] == 0 and last["update/reward_accuracy"] > 0.5
        assert last["eval/loss"] < math.log(2) and last["eval/reward_margin"] > 0
    if name == "kto":
        assert first["update/loss"] == pytest.approx(0.5)
        assert last["update/loss"] < 0.5 and last["update/kl_baseline"] >= 0
        assert 0 < last["eval/loss"] < 1 and 0 <= last["eval/reward_accuracy"] <= 1
        assert last["eval/reward_margin"] == pytest.approx(
            last["eval/desirable_reward"] - last["eval/undesirable_reward"]
        )
        assert "reward/kl" not in last


def test_kto_says_beforehand_that_answers_after_other_prompts_are_too_long(run_recipe, tmp_path):
    rows = [("1+1=", "2222222"), ("1+1+1+1=", "4")]
    lines = [json.dumps({"prompt": p, "answer": a, "label": True}) + "\n" for p, a in rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    told = [REFERENCE, f"data.train={tmp_path}/rows.jsonl", "data.prompts_per_step=2"]
    with pytest.raises(ValueError, match="8 tokens and longest answer of 8 .*roles.actor.micro"):
        run_recipe("kto", *told, "evaluation=null", "roles.actor.micro_batch_tokens=12")


def faults(write_recipe, dataflow: str, *overrides: str) -> list[str]:
    recipe = load_recipe(write_recipe(dataflow), overrides)
    return [str(fault) for fault in check(recipe)]


CHAT = ("data.messages_column=messages", "evaluation=null")


def test_kto_counts_the_assistants_tokens_of_a_conversation(run_recipe, assets):
    chat = (*CHAT, f"model.path={assets}/model", "roles.actor.micro_batch_tokens=64")
    whole, last = (
        run_recipe("kto", REFERENCE, *chat, f"data.turns={turns}", "steps=1")[0]
        for turns in ("all", "last")
    )
    rows = [json.loads(line) for line in (assets / "train.jsonl").open()]
    lengths = {2 * (len(row["answer"]) + 1) for row in rows}  # the same sum in both turns
    assert min(lengths) <= whole["update/response_length_mean"] <= max(lengths)
    assert last["update/tokens"] * 2 == whole["update/tokens"]
    assert whole["update/loss"] == pytest.approx(0.5), "policy and reference alike"


@pytest.mark.parametrize(("dataflow", "reader"), [("sft", "update"), ("kto", "rotate")])
def test_a_conversation_without_its_mask_is_a_fault(
    write_recipe, tmp_path, assets, dataflow, reader
):
    shipped = (SHIPPED / f"{dataflow}.yaml").read_text()
    path = tmp_path / "flow.yaml"
    path.write_text(shipped.replace(", {response_mask: target_mask}", ""))
    chat = (f"dataflow={path}", f"model.path={assets}/model", *CHAT)
    reference = [REFERENCE] if dataflow == "kto" else []
    found = faults(write_recipe, dataflow, *chat, *reference)
    assert any(
        f"node '{reader}' takes 'targets' of whole conversations" in fault for fault in found
    )
    assert all("set data.turns to last" in fault for fault in found)
    assert faults(write_recipe, dataflow, *chat, "data.turns=last", *reference) == []


def test_what_check_says(write_recipe, tmp_path):
    assert faults(write_recipe, "dpo", REFERENCE) == []
    found = faults(write_recipe, "dpo")
    assert len(found) == 2 and all(
        "the role 'reference', which the recipe lacks" in f for f in found
    )
    (found,) = faults(
        write_recipe,
        "dpo",
        REFERENCE,
        "data.chosen_column=choosen",
        "data.eval=null",
        "evaluation=null",
    )
    assert "no column 'choosen'" in found and "did you mean 'chosen'" in found
    (found,) = faults(write_recipe, "dpo", REFERENCE, "algorithm.preference.target_margin=0.1")
    assert "target_margin does nothing" in found and "simpo" in found
    (found,) = faults(write_recipe, "simpo", "algorithm.aggregation=sequence_mean_token_mean")
    assert "algorithm.aggregation does nothing: no loss of the dataflow is of tokens" in found
    alone = (SHIPPED / "dpo.yaml").read_text().replace("role: reference", "role: actor")
    (tmp_path / "alone.yaml").write_text(alone)
    found = faults(write_recipe, "dpo", f"dataflow={tmp_path}/alone.yaml")
    assert sum("compares the role 'actor' with itself" in fault for fault in found) == 2
    path = tmp_path / "flow.yaml"
    path.write_text(
        "inputs: [prompts, targets]\nnodes:\n  update:\n    {role: actor, call: update, "
        "in: [prompts, {responses: targets}], loss: orpo}\n"
    )
    (found,) = faults(write_recipe, "orpo", f"dataflow={path}", "evaluation=null")
    assert found.startswith(f"{path}:3") and "take `{responses: pairs}`" in found
