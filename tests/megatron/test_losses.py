"""Every loss gives one loss and one gradient norm, however its responses are spread and packed."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridflow.algorithms import LOSSES
from hybridflow.batch import Batch
from hybridflow.megatron.config import LossSettings, OptimizerSettings
from hybridflow.megatron.rows import check_fields
from hybridflow.recipe.axes import Axis
from megatron_bridge.layout import ParallelLayout
from tests.megatron.cases import make_batch, make_engine, my_part
from tests.ranks import run_ranks

ONE = ParallelLayout()
# Steps too small to move a float32 weight: every loss meets the same model.
STILL = OptimizerSettings(lr=1e-30, clip_grad=0.0)
BOUNDS = {"gmpo": (0.4, 0.4), "gspo": (0.1, 0.1), "gspo_token": (0.1, 0.1)}


def settings(name: str) -> LossSettings:
    low, high = BOUNDS.get(name, (0.2, 0.28))
    return LossSettings(
        name=name, clip_low=low, clip_high=high, dual_clip=1.3, tau_negative=2.0, kl_coef=0.05
    )


CASES = {
    **{name: settings(name) for name in LOSSES},
    "responses": replace(settings("gspo"), aggregation="sequence_mean_token_mean"),
    "undivided": replace(settings("sapo"), aggregation="sequence_mean_token_sum"),
    "divided": replace(settings("sapo"), aggregation="constant", loss_divisor=7.0),
}


def off_policy_batch() -> Batch:
    batch = make_batch()
    return batch.with_field("old_logprobs", Axis.TOKENS, batch["rollout_logprobs"])


def measure(path: str, layout: ParallelLayout, batch: Batch, **options: Any) -> dict[str, Any]:
    engine = make_engine(path, layout, optimizer=STILL, **options)
    part = my_part(batch, layout)
    return {name: engine.update(part, loss) for name, loss in CASES.items()}


@pytest.fixture(scope="module")
def expected(tiny_qwen3: str) -> dict[str, Any]:
    (result,) = run_ranks(measure, 1, tiny_qwen3, ONE, off_policy_batch(), micro_batch_tokens=999)
    return result


LAYOUTS = {
    "small packs": (ONE, 16),
    "dp2": (ParallelLayout(dp=2), 23),
    "tp2pp2": (ParallelLayout(tp=2, pp=2), 32),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_loss_is_the_same_however_it_is_spread(
    tiny_qwen3: str, expected: dict[str, Any], name: str
):
    layout, tokens = LAYOUTS[name]
    result = run_ranks(
        measure, layout.world, tiny_qwen3, layout, off_policy_batch(), micro_batch_tokens=tokens
    )[0]
    for case, metrics in expected.items():
        assert result[case] == pytest.approx(metrics, rel=1e-5, abs=1e-7), case


def test_the_cases_meet_their_bounds(expected: dict[str, Any]):
    """Else a bound that does nothing would pass for one that is invariant."""
    for case, metrics in expected.items():
        assert metrics["grad_norm"] > 0, case
        if "clip_fraction" in metrics:
            assert 0 < metrics["clip_fraction"] < 1, case
    assert 0 < expected["dual_clip"]["dual_clip_fraction"] < 1
    assert expected["gspo"]["loss"] != expected["responses"]["loss"]


def test_the_divisor_divides(expected: dict[str, Any]):
    whole, seventh = (expected[case]["grad_norm"] for case in ("undivided", "divided"))
    assert whole == pytest.approx(7 * seventh, rel=1e-5)


def test_advantages_per_token_are_refused_for_whole_responses():
    batch = off_policy_batch()
    per_token = batch["responses"].with_values(torch.ones(len(batch["responses"].values)))
    batch = batch.with_field("advantages", Axis.TOKENS, per_token)
    with pytest.raises(ValueError, match="'gmpo' takes one advantage per response"):
        check_fields(batch, settings("gmpo"))
    check_fields(batch, settings("gspo_token"))


def test_old_logprobs_are_needed_by_losses_that_compare_policies():
    batch = make_batch()
    for name, loss in LOSSES.items():
        if loss.compares_policies:
            with pytest.raises(ValueError, match="need the field 'old_logprobs'"):
                check_fields(batch, replace(settings(name), epochs=2))
        else:
            check_fields(batch, replace(settings(name), epochs=2))
