"""Whole runs in this process: a real engine, a real rollout server, no Ray."""

import json
from typing import Any

import pytest
import yaml

from hybridflow.cluster import LocalSession
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.dataflow.run_folder import RunFolder
from hybridflow.dataflow.runner import ConcurrentRunner, SerialRunner
from hybridflow.monitor import RunWriter, read_metrics, read_rollouts
from hybridflow.recipe.compile import compile_recipe


def run(recipe, runner=None, **options):
    plan = compile_recipe(recipe)
    return train(plan, lambda logs: LocalSession(), LaunchOptions(live=False, **options), runner)


def measured(folder):
    """Every metric that does not depend on the clock."""
    skipped = ("seconds", "throughput/")
    return [
        {k: v for k, v in row["metrics"].items() if not any(part in k for part in skipped)}
        for row in read_metrics(folder)
    ]


def test_both_runners_give_the_same_run_bit_for_bit(make_recipe, tmp_path) -> None:
    serial = run(make_recipe(f"output={tmp_path}/serial"), SerialRunner())
    concurrent = run(make_recipe(f"output={tmp_path}/concurrent"), ConcurrentRunner())
    assert measured(serial) == measured(concurrent)
    assert list(read_rollouts(serial)) == list(read_rollouts(concurrent))
    last = measured(serial)[-1]
    assert last["weights/version"] == 4, "one at the end of the warm start, one after each step"
    assert last["update/rollout_gap_max"] < 1e-4, "sampler and trainer agree in float32"
    assert {"reward/mean", "update/loss", "update/grad_norm", "eval/reward"} <= last.keys()


def test_a_new_graph_needs_no_code(make_recipe, recipe_file) -> None:
    """Other field names, a second reward, and a function that combines the two."""
    recipe = yaml.safe_load(recipe_file.read_text())
    recipe["roles"]["brevity"] = {"function": "length", "parameters": {"budget": 3}}
    recipe["dataflow"] = {
        "inputs": ["prompts", "answers"],
        "nodes": {
            "sample": {
                "role": "rollout",
                "call": "generate",
                "in": ["prompts"],
                "out": [{"responses": "texts"}, {"rollout_logprobs": "sampled"}],
            },
            "right": {
                "role": "reward",
                "call": "score",
                "in": ["prompts", "answers", {"responses": "texts"}],
                "out": [{"rewards": "rightness"}],
            },
            "short": {
                "role": "brevity",
                "call": "score",
                "in": ["prompts", "answers", {"responses": "texts"}],
                "out": [{"rewards": "shortness"}],
            },
            "both": {
                "function": "weighted_sum",
                "in": [{"first": "rightness"}, {"second": "shortness"}],
                "out": [{"total": "value"}],
                "weights": [1.0, 0.25],
            },
            "compare": {
                "function": "group_relative",
                "in": [{"rewards": "value"}],
                "out": [{"advantages": "gain"}],
            },
            "learn": {
                "role": "actor",
                "call": "update",
                "in": [
                    "prompts",
                    {"responses": "texts"},
                    {"rollout_logprobs": "sampled"},
                    {"advantages": "gain"},
                ],
                "loss": "ppo_clip",
            },
            "publish": {"role": "actor", "call": "publish", "to": "rollout", "after": ["learn"]},
        },
    }
    recipe_file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    folder = run(make_recipe("steps=2"))
    rows = list(read_rollouts(folder))
    assert {tuple(row["rewards"]) for row in rows} == {("rightness", "shortness")}
    main = [row["metrics"] for row in read_metrics(folder) if row["stage"] == "main"]
    for step in main:
        combined = step["reward/rightness/mean"] + 0.25 * step["reward/shortness/mean"]
        assert step["reward/mean"] == pytest.approx(combined, rel=1e-6)


def test_off_policy_with_a_reference(make_recipe, tmp_path) -> None:
    """Mini-batches and epochs bring the pass for old log-probabilities, the KL that of the
    reference; at the first step both equal the actor's own."""
    path = tmp_path / "varied.py"
    path.write_text(
        "def varied(prompt, response, answer, row):\n    return sum(map(ord, response)) % 7\n"
    )
    folder = run(
        make_recipe(
            "roles.actor.mini_batches=2",
            "roles.actor.epochs=2",
            "algorithm.kl.coef=0.1",
            "roles.reference={colocate: actor}",
            f"roles.reward.function={path}:varied",
            "warm_start=null",
            "steps=2",
        )
    )
    nodes = [set(row["node_seconds"]) for row in read_metrics(folder)]
    assert all({"old", "ref"} <= names for names in nodes)
    first, second = (row["metrics"] for row in read_metrics(folder))
    assert first["update/kl"] != second["update/kl"]


def test_resume_goes_on_where_the_checkpoint_was(make_recipe, tmp_path) -> None:
    whole = run(make_recipe(f"output={tmp_path}/whole", "steps=4"))
    part = run(make_recipe(f"output={tmp_path}/part", "steps=4"))
    (latest,) = [p for p in (part / "checkpoints").iterdir() if p.name == "step-000006"]
    before = json.loads((latest / "state.json").read_text())
    assert before["step"] == 4 and before["stage_index"] == 1
    for path in latest.iterdir():  # as if the run had ended before its last checkpoint
        path.unlink() if path.is_file() else [p.unlink() for p in path.rglob("*") if p.is_file()]
    reached = RunFolder(part).noted_version()
    assert reached == 5
    resumed = run(make_recipe(f"output={tmp_path}/part", "steps=4"), resume=True)
    strip = [
        {k: v for k, v in row.items() if not k.startswith(("weights/", "publish/"))}
        for row in measured(whole)
    ]
    again = [
        {k: v for k, v in row.items() if not k.startswith(("weights/", "publish/"))}
        for row in measured(resumed)
    ]
    assert again == strip, "the steps after the checkpoint repeat bit for bit"
    rows = read_metrics(resumed)
    main = {row["step"]: row["metrics"] for row in rows if row["stage"] == "main"}
    later = [main[step]["weights/version"] for step in (3, 4)]
    # The weights of the checkpoint go to the servers under a number of their own, before step 3.
    assert later == [reached + 2, reached + 3], "no number of the run is given twice"
    with pytest.raises(ValueError, match="after step 4 of stage 'main', which has 3 by the recipe"):
        run(make_recipe(f"output={tmp_path}/part", "steps=3"), resume=True)
    assert "steps: 4" in (part / "recipe.yaml").read_text(), "nothing is changed"


def test_a_checkpoint_counts_once_its_step_is_recorded(make_recipe, tmp_path, monkeypatch) -> None:
    record = RunWriter.step

    def full(self: RunWriter, step: int, stage: str, *rest: Any) -> None:
        if (stage, step) == ("main", 2):
            raise OSError(28, "No space left on device")
        record(self, step, stage, *rest)

    monkeypatch.setattr(RunWriter, "step", full)
    with pytest.raises(OSError, match="No space left"):
        run(make_recipe("steps=4"))
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-000002", "step-000004.partial"]


def test_a_failing_reward_names_the_node_the_function_and_the_sample(make_recipe, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def broken(prompt, response, answer, row):\n    raise KeyError('units')\n")
    with pytest.raises(RuntimeError, match=r"(?s)node 'score'.*reward rank 0.*broken.*units"):
        run(make_recipe(f"roles.reward.function={path}:broken", "warm_start=null"))
