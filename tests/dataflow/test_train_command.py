"""`hybridflow train` on Ray with an actor of two ranks: what it leaves, and how it ends."""

import signal

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.cluster import LocalSession
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.monitor import read_events, read_metrics, read_rollouts
from hybridflow.recipe.activate import SHIPPED
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.load import load_recipe
from tests.dataflow.commands import TrainCommand

DP2 = "roles.actor.parallel.dp=2"


VARIED = """
def varied(prompt, response, answer, row):
    return sum(map(ord, response)) % 7
"""
OWN = """
import torch
from hybridflow.algorithms import register_function, register_loss
from hybridflow.algorithms.losses import TokenLoss
from hybridflow.recipe.catalogue import FUNCTIONS, LOSSES

@register_function("own_advantage", FUNCTIONS["group_relative"])
def own_advantage(batch, context):
    rewards_PG = batch["rewards"].view(batch.prompts, batch.samples_per_prompt)
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return {"advantages": (centred_PG / (rewards_PG.std(1, keepdim=True) + 1e-6)).flatten()}

@register_loss("own_loss", LOSSES["ppo_clip"])
def own_loss(inputs):
    ratio_T = (inputs.logprobs_T - inputs.old_logprobs_T).exp()
    held_T = ratio_T.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    gain_T = torch.minimum(ratio_T * inputs.advantages_T, held_T * inputs.advantages_T)
    return TokenLoss(-gain_T, {"own_ratio": ratio_T.detach().sum()})
"""


@pytest.fixture
def own(tmp_path) -> list[str]:
    """GRPO by a function and a loss of a user's own file."""
    module, graph = tmp_path / "own.py", tmp_path / "own.yaml"
    module.write_text(OWN)
    text = (SHIPPED / "grpo.yaml").read_text().replace("group_relative", "own_advantage")
    graph.write_text(text.replace("ppo_clip", "own_loss"))
    return [f"imports=[{module}]", f"dataflow={graph}"]


@pytest.fixture
def varied(tmp_path) -> str:
    """Rewards that differ on a model that has learnt nothing."""
    (tmp_path / "varied.py").write_text(VARIED)
    return f"roles.reward.function={tmp_path / 'varied.py'}:varied"


@pytest.mark.usefixtures("own_names")
def test_a_run_on_two_ranks_leaves_all_it_promises(
    recipe_file, make_recipe, tmp_path, own, varied
) -> None:
    """And by a loss of the user's own it learns what it learns by that of GRPO."""
    run = TrainCommand(recipe_file, DP2, varied, *own)
    assert run.wait() == 0, run.output
    assert not run.left_over()
    folder = tmp_path / "run"

    last = read_metrics(folder)[-1]
    assert (last["stage"], last["step"]) == ("main", 3)
    assert last["metrics"]["update/rollout_gap_max"] < 1e-4
    assert last["metrics"]["reward/std"] > 0 and last["metrics"]["update/grad_norm"] > 0
    assert last["metrics"]["update/own_ratio"] == pytest.approx(1.0)
    assert [event["kind"] for event in read_events(folder)][-1] == "report"
    assert sum(1 for row in read_rollouts(folder) if not row["evaluation"]) == 3 * 6 * 4
    html = (folder / "report.html").read_text()
    assert "<svg" in html and "http://" not in html.replace("http://www.w3.org", "")
    events = EventAccumulator(str(folder / "tensorboard" / "main")).Reload()
    assert len(events.Scalars("reward/mean")) == 3
    written, told = load_recipe(folder / "recipe.yaml"), make_recipe(DP2, varied, *own)
    assert written == told.model_copy(update={"dataflow": written.dataflow})
    assert compile_recipe(written).stages == compile_recipe(told).stages

    exported = AutoModelForCausalLM.from_pretrained(folder / "export", dtype="auto")
    assert all(torch.isfinite(p).all() for p in exported.parameters())
    assert AutoTokenizer.from_pretrained(folder / "export")("07+15=").input_ids

    single = compile_recipe(make_recipe(f"output={tmp_path}/single", varied))
    train(single, lambda logs: LocalSession(), LaunchOptions(live=False))
    for ours, theirs in zip(read_metrics(folder), read_metrics(tmp_path / "single"), strict=True):
        for name in ("reward/mean", "update/loss", "update/grad_norm", "eval/reward"):
            if name in theirs["metrics"]:
                # Sums in another order; sampling turns a difference of 1e-6 into other tokens
                # only where a draw lies that close to a boundary.
                expected = pytest.approx(theirs["metrics"][name], rel=1e-3, abs=1e-4)
                assert ours["metrics"][name] == expected, (ours["stage"], ours["step"], name)


def test_ctrl_c_ends_everything_and_resume_goes_on(recipe_file, tmp_path) -> None:
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step-000004"
    run = TrainCommand(recipe_file, "steps=500")
    run.wait_for("a checkpoint", checkpoint.is_dir)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.output
    assert not run.left_over()
    reported = [(row["stage"], row["step"]) for row in read_metrics(folder)]
    assert reported == sorted(reported, key=lambda at: (at[0] == "main", at[1]))
    assert (folder / "report.html").is_file()

    done = [int(p.name[5:]) - 2 for p in (folder / "checkpoints").glob("step-??????")]
    again = TrainCommand(recipe_file, "--resume", f"steps={max(done) + 2}")
    assert again.wait() == 0, again.output
    assert not again.left_over()
    resumed = read_metrics(folder)
    assert [row["step"] for row in resumed] == [1, 2, *range(1, max(done) + 3)]


def test_a_bad_recipe_is_two_and_says_where(recipe_file) -> None:
    run = TrainCommand(recipe_file, "roles.actor.parallel.dp=4", "data.train=nowhere.jsonl")
    assert run.wait() == 2
    assert "nowhere.jsonl" in run.output and "devices" in run.output
    assert "Traceback" not in run.output
