"""Safe RLHF on the tiny model: a reward and a cost, a critic of each, and lambda between them."""

import shutil

import pytest

from hybridflow.algorithms.lagrangian import next_multiplier
from hybridflow.monitor import read_metrics
from hybridflow.recipe.compile import compile_recipe
from tests.dataflow.reported import assert_reported
from tests.dataflow.test_ppo import measured, run

CRITIC = "{optimizer: {lr: 1e-3}, colocate: actor}"


def test_lambda_follows_the_cost_and_is_resumed(make_recipe, tmp_path) -> None:
    """The reward's values are of tokens and sum to 0 in every response, the cost's of responses."""
    scorer = tmp_path / "scores.py"
    scorer.write_text(
        "def praise(prompt, response, answer, row):\n"
        "    praised = [0.0] * len(response)\n"
        "    if len(response) > 1:\n"
        "        praised[0], praised[-1] = 9.0, -9.0\n"
        "    return praised\n"
        "def costly(prompt, response, answer, row):\n    return sum(map(ord, response)) % 5 / 5\n"
    )
    recipe = make_recipe(
        *("dataflow=safe_rlhf", "steps=3", "warm_start=null", "evaluation=null", "export=false"),
        *("data.samples_per_prompt=1", f"roles.reward.function={scorer}:praise"),
        *("roles.reward.level=token", "algorithm.gae={whiten_rewards: true}"),
        "algorithm.aggregation=sequence_mean_token_sum",
        f"roles.cost={{function: {scorer}:costly}}",
        *(f"roles.critic={CRITIC}", "roles.cost_critic={head: value, " + CRITIC[1:]),
        *("roles.reference={colocate: actor}", "algorithm.kl={coef: 0.1, place: reward}"),
        "roles.rollout.colocate=actor",
        *("algorithm.lagrangian={limit: 0.1, start: 2.0, lr: 0.3}", "checkpoint.every=1"),
    )
    folder = run(recipe)
    rows = [row["metrics"] for row in read_metrics(folder)]
    multiplier = 2.0
    for row in rows:
        assert row.get("state/lambda", multiplier) == pytest.approx(multiplier)
        assert row["critic/grad_norm"] > 0 and row["cost_critic/grad_norm"] > 0
        for role in ("actor", "critic", "cost_critic"):  # all give way to the rollout
            assert row[f"memory/{role}_released_bytes"] > 0
        assert row["cost/mean"] == row["reward/costs/mean"]
        assert row["reward/mean"] == row["reward/rewards/mean"]
        multiplier = next_multiplier(multiplier, row["cost/mean"], 0.1, 0.3)
    assert multiplier != 2.0
    assert_reported(rows[-1], compile_recipe(recipe).stages[-1].graph)
    # Nothing to learn for the critic but from single tokens: it starts near 0, and so does the KL.
    # A loss of the sum over tokens would be five times as large, and is the actor's alone.
    assert all(row["reward/mean"] == 0 for row in rows) and 0.1 < rows[0]["critic/loss"] < 2
    before = measured(folder)
    shutil.rmtree(folder / "checkpoints" / "step-000003")
    assert measured(run(recipe, resume=True)) == before
