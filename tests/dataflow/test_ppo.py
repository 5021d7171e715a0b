"""PPO with a critic on the tiny model: a real engine for each model, a real rollout server."""

import shutil
from pathlib import Path

from transformers import AutoModelForSequenceClassification

from hybridflow.cluster import LocalSession
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.monitor import read_metrics
from hybridflow.recipe.checks import check
from hybridflow.recipe.compile import compile_recipe
from tests.dataflow.reported import assert_reported

CRITIC = "roles.critic={optimizer: {lr: 1e-3, schedule: cosine}, colocate: actor, epochs: 2}"
# A reward that is constant "so far" counts from where the process began.
SKIPPED = ("seconds", "throughput/", "memory/", "weights/", "publish/", "/constant")


def run(recipe, **options) -> Path:
    assert check(recipe) == []
    plan = compile_recipe(recipe)
    return train(plan, lambda logs: LocalSession(), LaunchOptions(live=False, **options))


def measured(folder: Path) -> list[dict[str, float]]:
    """Every metric that does not depend on the clock or on how often weights were sent."""
    return [
        {k: v for k, v in row["metrics"].items() if not any(part in k for part in SKIPPED)}
        for row in read_metrics(folder)
    ]


def overrides(folder: Path) -> list[str]:
    """Rewards that differ on an untrained model, the KL in them, and a warm-up of the critic."""
    scorer = folder / "varied.py"
    scorer.write_text(
        "def varied(prompt, response, answer, row):\n    return sum(map(ord, response)) % 7 / 7\n"
    )
    return [
        *("dataflow=ppo", "steps=3", "warm_start=null", "evaluation=null", CRITIC),
        *(f"roles.reward.function={scorer}:varied", "data.samples_per_prompt=1"),
        *("roles.reference={colocate: actor}", "algorithm.kl={coef: 0.05, place: reward}"),
        *("algorithm.critic_warmup_steps=2", "checkpoint.keep=3"),
    ]


def test_ppo_trains_both_models_and_resumes(make_recipe, tmp_path) -> None:
    """Two steps of the critic alone, then three of both; checkpoints after 2, 4 and 5."""
    recipe = make_recipe(*overrides(tmp_path))
    whole = run(recipe)
    rows = measured(whole)
    stages = [row["stage"] for row in read_metrics(whole)]
    assert stages == ["critic_warmup"] * 2 + ["main"] * 3
    for row, stage in zip(rows, stages, strict=True):
        assert row["critic/grad_norm"] > 0 and row["critic/loss"] > 0
        assert row["critic/explained_variance"] <= 1 and 0 <= row["critic/clip_fraction"] <= 1
        assert ("update/loss" in row) == (stage == "main")
    last = list(read_metrics(whole))[-1]["metrics"]
    assert_reported(last, compile_recipe(recipe).stages[-1].graph)
    # The reference is the actor until the first update; the critic's schedule spans both stages.
    assert rows[2]["update/kl"] == 0 < rows[3]["update/kl"]
    rates = [row["critic/lr"] for row in rows]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 5

    critic = AutoModelForSequenceClassification.from_pretrained(whole / "export_critic")
    assert critic.score.weight.shape[0] == 1 and (whole / "export").is_dir()

    # From within the main stage, then from where the warm-up ended: the critic's optimizer goes on.
    for lost in (("step-000005",), ("step-000004", "step-000005")):
        for name in lost:
            shutil.rmtree(whole / "checkpoints" / name)
        assert measured(run(recipe, resume=True)) == rows
