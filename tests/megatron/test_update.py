"""Mini-batches, epochs, packing, losses, and what must be refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridflow.algorithms import AGGREGATIONS
from hybridflow.algorithms.agreement import Disagreement
from hybridflow.batch import Batch
from hybridflow.cluster.transfer import MINI_BATCHES, transfer_of
from hybridflow.megatron.config import LossSettings, OptimizerSettings
from hybridflow.recipe.axes import Axis
from hybridflow.workers.model import ModelWorker
from megatron_bridge.layout import ParallelLayout
from tests.megatron.cases import (
    GRPO,
    OPTIMIZER,
    make_batch,
    make_engine,
    merged,
    my_part,
    two_steps,
)
from tests.ranks import RanksFailed, run_ranks

ONE, DP2 = ParallelLayout(), ParallelLayout(dp=2)


def updates(
    path: str, layout: ParallelLayout, batches: list[Batch], loss: LossSettings, **options: Any
) -> dict[str, Any]:
    engine = make_engine(path, layout, **options)
    parts = [my_part(batch, layout, loss.mini_batches) for batch in batches]
    metrics = [engine.update(part, loss) for part in parts]
    weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
    return {"metrics": metrics, "weights": weights}


def assert_same_weights(given: dict[str, Any], expected: dict[str, Any], atol: float = 2e-6):
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(given["weights"][name], tensor, rtol=1e-5, atol=atol)


def with_old(batch: Batch) -> Batch:
    return batch.with_field("old_logprobs", Axis.TOKENS, batch["rollout_logprobs"])


def test_mini_batches_and_epochs_are_single_steps_in_order(tiny_qwen3: str):
    batch = with_old(make_batch())
    loss = LossSettings(clip_low=0.9, clip_high=5.0, mini_batches=2, epochs=2)
    single = LossSettings(clip_low=0.9, clip_high=5.0)
    (whole,) = run_ranks(updates, 1, tiny_qwen3, ONE, [batch], loss)
    (steps,) = run_ranks(updates, 1, tiny_qwen3, ONE, [*batch.split(2), *batch.split(2)], single)
    assert_same_weights(whole, steps, atol=0)
    norms = [metrics["grad_norm"] for metrics in steps["metrics"]]
    assert whole["metrics"][0]["grad_norm"] == pytest.approx(sum(norms) / 4)
    assert whole["metrics"][0]["ratio_mean"] != 1


def test_ranks_do_not_change_what_a_mini_batch_holds(tiny_qwen3: str):
    batch = with_old(make_batch())
    loss = replace(GRPO, clip_low=0.9, clip_high=5.0, mini_batches=2, epochs=2)
    (expected,) = run_ranks(updates, 1, tiny_qwen3, ONE, [batch], loss)
    split = run_ranks(updates, 2, tiny_qwen3, DP2, [batch], loss)[0]
    assert_same_weights(split, expected)
    assert split["metrics"][0] == pytest.approx(expected["metrics"][0], rel=1e-5, abs=1e-6)


def test_every_kind_of_update_is_dealt_so():
    for method in (ModelWorker.update, ModelWorker.update_values, ModelWorker.update_scores):
        assert transfer_of(method) is MINI_BATCHES


@pytest.mark.parametrize("aggregation", sorted({*AGGREGATIONS} - {"constant"}))
def test_packing_and_ranks_do_not_change_the_step(tiny_qwen3: str, aggregation: str):
    batch = make_batch()
    loss = LossSettings(aggregation=aggregation, kl_coef=0.1)
    (expected,) = run_ranks(updates, 1, tiny_qwen3, ONE, [batch], loss, micro_batch_tokens=999)
    (small,) = run_ranks(updates, 1, tiny_qwen3, ONE, [batch], loss, micro_batch_tokens=16)
    split = run_ranks(updates, 2, tiny_qwen3, DP2, [batch], loss, micro_batch_tokens=23)[0]
    for given in (small, split):
        assert_same_weights(given, expected)
        assert given["metrics"][0] == pytest.approx(expected["metrics"][0], rel=1e-5, abs=1e-7)


def test_advantages_per_token_equal_those_per_sample(tiny_qwen3: str):
    batch = make_batch()
    per_token = batch["responses"].with_values(
        torch.repeat_interleave(batch["advantages"], batch["responses"].lengths)
    )
    both = [batch, batch.with_field("advantages", Axis.TOKENS, per_token)]
    first, second = (run_ranks(updates, 1, tiny_qwen3, ONE, [b], GRPO)[0] for b in both)
    assert_same_weights(first, second, atol=0)


def test_cross_entropy_learns_the_targets(tiny_qwen3: str):
    """Supervised: one target a prompt, on the prompts axis; the loss falls step by step."""
    batch = make_batch()
    targets = batch["responses"].take([0, 3, 6, 9])
    batch = Batch(
        {"prompts": batch["prompts"], "responses": targets},
        {"prompts": Axis.PROMPTS, "responses": Axis.PROMPTS},
        prompts=4,
        samples_per_prompt=1,
    )
    optimizer = OptimizerSettings(lr=1e-2)
    loss = LossSettings(name="cross_entropy")
    result = run_ranks(updates, 2, tiny_qwen3, DP2, [batch] * 5, loss, optimizer=optimizer)[0]
    losses = [metrics["loss"] for metrics in result["metrics"]]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.6 * losses[0]
    assert result["metrics"][0]["tokens"] == len(targets.values)


def test_bfloat16_trains(tiny_qwen3: str):
    (result,) = run_ranks(
        updates, 1, tiny_qwen3, ONE, [make_batch()] * 2, GRPO, dtype=torch.bfloat16
    )
    (exact,) = run_ranks(updates, 1, tiny_qwen3, ONE, [make_batch()] * 2, GRPO)
    assert result["weights"]["lm_head.weight"].dtype is torch.bfloat16
    for given, expected in zip(result["metrics"], exact["metrics"], strict=True):
        assert given["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)


@pytest.mark.parametrize("field", ["advantages", "ref_logprobs"])
def test_nan_is_an_error_on_every_rank(tiny_qwen3: str, field: str):
    batch = make_batch()
    data = batch[field].clone()
    (data if field == "advantages" else data.values)[-1] = float("nan")
    with pytest.raises(RanksFailed, match="optimizer step 0: the gradient norm is nan") as failure:
        run_ranks(
            updates, 2, tiny_qwen3, DP2, [batch.with_field(field, batch.axes[field], data)], GRPO
        )
    assert str(failure.value).count("optimizer step 0: the gradient norm is nan") >= 2


def test_faults_are_named(tiny_qwen3: str):
    batch = make_batch()
    many = LossSettings(mini_batches=2)
    cases: list[tuple[Batch, LossSettings, dict[str, Any], str]] = [
        (batch, many, {}, "need the field 'old_logprobs'"),
        (batch.select(["prompts", "responses"]), GRPO, {}, "needs the field 'advantages'"),
        (batch, LossSettings(name="ppo_clp"), {}, "did you mean 'ppo_clip'"),
        (
            batch.select(["prompts", "responses", "advantages"]),
            LossSettings(agreement_bound=1e-4),
            {},
            "agreement.bound needs the field 'rollout_logprobs'",
        ),
        (batch, GRPO, {"micro_batch_tokens": 4}, "raise micro_batch_tokens"),
        (batch, GRPO, {"optimizer": None}, "made without an optimizer"),
        (with_old(batch), LossSettings(mini_batches=5), {}, "at least dp x mini_batches prompts"),
    ]
    for given, loss, options, text in cases:
        with pytest.raises(RanksFailed, match=text):
            run_ranks(updates, 1, tiny_qwen3, ONE, [given], loss, **options)


def _with_own_logprobs(path: str, batch: Batch, loss: LossSettings) -> Batch:
    """A rollout that agrees with the trainer."""
    (result,) = run_ranks(two_steps, 1, path, ONE, batch, loss)
    return batch.with_field("rollout_logprobs", Axis.TOKENS, merged([result], "before"))


def test_disagreement_names_the_sample_on_every_rank(tiny_qwen3: str):
    bounded = replace(GRPO, agreement_bound=1e-4)
    agreeing = _with_own_logprobs(tiny_qwen3, make_batch(), GRPO)
    (result,) = run_ranks(updates, 1, tiny_qwen3, ONE, [agreeing], bounded)
    assert result["metrics"][0]["rollout_gap_max"] < 1e-5
    assert result["metrics"][0]["rollout_gap_share"] == 0

    rollout = agreeing["rollout_logprobs"].clone()
    sample = 8  # of the second data-parallel rank
    token = len(rollout[sample]) - 1
    rollout[sample][token] -= 0.5
    versions = rollout.with_values(torch.full((len(rollout.values),), 4))
    wrong = agreeing.with_field("rollout_logprobs", Axis.TOKENS, rollout)
    text = f"sample {sample}, token {token} of the response"
    with pytest.raises(RanksFailed, match=text) as failure:
        run_ranks(updates, 4, tiny_qwen3, ParallelLayout(pp=2, dp=2), [wrong], bounded)
    assert str(failure.value).count(f"Disagreement: {text}") >= 4

    # The first of two mini-batches holds prompts 0 and 1, and sample 4 is the second rank's.
    rollout = agreeing["rollout_logprobs"].clone()
    rollout[4][0] -= 0.5
    early = agreeing.with_field("rollout_logprobs", Axis.TOKENS, rollout)
    halves = replace(bounded, mini_batches=2)
    with pytest.raises(RanksFailed, match="Disagreement: sample 4, token 0 of the response"):
        run_ranks(updates, 2, tiny_qwen3, DP2, [with_old(early)], halves)

    versions[sample][token] = 3  # an older version: it may differ
    stale = wrong.with_field("token_versions", Axis.TOKENS, versions)
    current = replace(bounded, weight_version=4)
    (result,) = run_ranks(updates, 1, tiny_qwen3, ONE, [stale], current)
    assert result["metrics"][0]["rollout_gap_max"] < 1e-5
    other = replace(bounded, weight_version=5)
    (result,) = run_ranks(updates, 1, tiny_qwen3, ONE, [stale], other)
    assert not [name for name in result["metrics"][0] if "rollout" in name], "nothing is compared"


def test_an_old_policy_that_is_not_the_actors_ends_the_update(tiny_qwen3: str):
    """Before the first optimizer step the ratio must be 1; later mini-batches may differ."""
    bounded = replace(GRPO, old_bound=1e-4, mini_batches=2)
    own = with_old(_with_own_logprobs(tiny_qwen3, make_batch(), GRPO))
    (result,) = run_ranks(updates, 1, tiny_qwen3, ONE, [own], bounded)
    assert result["metrics"][0]["old_gap_mean"] < 1e-5 and result["metrics"][0]["ratio_mean"] != 1
    cold = own["old_logprobs"].with_values(own["old_logprobs"].values * 0.9)  # a temperature
    wrong = own.with_field("old_logprobs", Axis.TOKENS, cold)
    with pytest.raises(RanksFailed, match="'old_logprobs' differ from the actor's own") as failure:
        run_ranks(updates, 2, tiny_qwen3, DP2, [wrong], bounded)
    assert str(failure.value).count("Disagreement: 'old_logprobs' differ") >= 2
    (result,) = run_ranks(updates, 1, tiny_qwen3, ONE, [wrong], replace(bounded, old_bound=None))
    assert result["metrics"][0]["old_gap_mean"] > 1e-2


def refused(path: str, layout: ParallelLayout, batch: Batch, losses: list[LossSettings]) -> int:
    """How many of ``losses`` end an update of momentum and weight decay with all weights as they
    were."""
    engine = make_engine(path, layout)
    engine.update(my_part(batch, layout), replace(losses[0], agreement_bound=None, old_bound=None))
    held = 0
    for loss in losses:
        before = {n: t.clone() for n, t in engine.export_weights()}
        with pytest.raises(Disagreement):
            engine.update(my_part(batch, layout), loss)
        held += all(torch.equal(before[n], t) for n, t in engine.export_weights())
    return held


@pytest.mark.parametrize("layout", [ParallelLayout(dp=2), ParallelLayout(pp=2)], ids=["dp2", "pp2"])
def test_what_disagrees_is_never_written_into_the_weights(tiny_qwen3: str, layout: ParallelLayout):
    """Neither the old policy's bound nor the rollout's lets an optimizer step pass."""
    batch = with_old(make_batch())
    bounds = ({"old_bound": 1e-4}, {"agreement_bound": 1e-4})
    losses = [replace(GRPO, mini_batches=2, **bound) for bound in bounds]
    assert run_ranks(refused, 2, tiny_qwen3, layout, batch, losses)[0] == 2


def test_an_empty_rank_is_an_error_on_every_rank(tiny_qwen3: str):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(updates, 2, tiny_qwen3, DP2, [make_batch().slice(0, 1)], GRPO)
    assert str(failure.value).count("ValueError: 1 of 1 mini-batches x 2") >= 2


def test_optimizer_settings_check_themselves():
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        OptimizerSettings(lr=1.0, schedule="cosin")
    with pytest.raises(ValueError, match="total_steps=3"):
        OptimizerSettings(lr=1.0, schedule="linear", warmup_steps=3, total_steps=3)
    assert OPTIMIZER.betas == (0.9, 0.999)
