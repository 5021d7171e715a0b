"""Losses of whole responses: the same however pairs are spread over ranks and packs."""

from typing import Any

import pytest
import torch

from hybridflow.algorithms import PREFERENCES
from hybridflow.algorithms.losses.preference import PreferenceSettings, Responses
from hybridflow.batch import Batch
from hybridflow.megatron.config import LossSettings, OptimizerSettings
from hybridflow.megatron.rows import check_fields
from hybridflow.recipe.axes import Axis
from megatron_bridge.layout import ParallelLayout
from tests.megatron.cases import make_batch, make_engine, my_part
from tests.ranks import run_ranks

ONE = ParallelLayout()
STILL = OptimizerSettings(lr=1e-30, clip_grad=0.0)
SETTINGS = PreferenceSettings(label_smoothing=0.1, desirable_weight=1.3)
CASES = {name: LossSettings(name=name, preference=SETTINGS) for name in PREFERENCES}
MASKED = torch.tensor([True, False, True, True, True, True, False, True])
FIELDS = ("prompts", "responses", "ref_logprobs")


def pairs_batch() -> Batch:
    """Four prompts with two responses each, of different lengths."""
    whole = make_batch()
    rows = [row for row in range(12) if row % 3 < 2]
    tokens = {name: whole[name].take(rows) for name in ("responses", "ref_logprobs")}
    batch = Batch(
        {"prompts": whole["prompts"], **tokens},
        {name: whole.axes[name] for name in FIELDS},
        prompts=4,
        samples_per_prompt=2,
    )
    labels = torch.tensor([True, False, True, True, False, False, True, False])
    batch = batch.with_field("labels", Axis.SAMPLES, labels)
    return batch.with_field("kl_baseline", Axis.RUN, 0.3)


def measure(path: str, layout: ParallelLayout, batch: Batch, **options: Any) -> dict[str, Any]:
    engine = make_engine(path, layout, optimizer=STILL, **options)
    part = my_part(batch, layout)
    found: dict[str, Any] = {name: engine.update(part, loss) for name, loss in CASES.items()}
    masked = my_part(batch.with_field("sample_mask", Axis.SAMPLES, MASKED), layout)
    found |= {f"masked {name}": engine.update(masked, loss) for name, loss in CASES.items()}
    found["held out"] = engine.evaluate(part, CASES["dpo"])
    found["logprobs"] = engine.logprobs(part)
    return found


@pytest.fixture(scope="module")
def expected(tiny_qwen3: str) -> dict[str, Any]:
    return run_ranks(measure, 1, tiny_qwen3, ONE, pairs_batch(), micro_batch_tokens=999)[0]


def test_the_engine_gives_the_losses_their_responses(expected: dict[str, Any]):
    batch = pairs_batch()
    lengths = batch["responses"].lengths

    def sums(ragged: Any) -> torch.Tensor:
        return torch.stack([row.double().sum() for row in ragged.rows()])

    logprobs_S, ref_S = sums(expected["logprobs"]), sums(batch["ref_logprobs"])
    for case, name in [*((name, name) for name in CASES), *((f"masked {n}", n) for n in CASES)]:
        loss, kept_S = PREFERENCES[name], MASKED
        if case == name:
            kept_S = torch.ones_like(MASKED)
        elif loss.pairs:  # without its other response a pair takes no part
            kept_S = torch.tensor([False, False, True, True, True, True, False, False])
        told = (each[kept_S] for each in (logprobs_S, lengths, ref_S, batch["labels"]))
        exact = loss(Responses(*told, 0.3), SETTINGS)
        assert expected[case]["loss"] == pytest.approx(exact.loss_N.mean().item(), rel=1e-5)
        for metric, values in exact.metrics.items():
            given = pytest.approx(values.mean().item(), rel=1e-4, abs=1e-6)
            assert expected[case][metric] == given, (case, metric)
        if loss.kinds is not None:
            good, bad = (expected[case][kind] for kind in loss.kinds)
            assert expected[case]["reward_margin"] == pytest.approx(good - bad)
        assert expected[case]["grad_norm"] > 0
    assert expected["held out"]["loss"] == pytest.approx(expected["dpo"]["loss"], rel=1e-6)


LAYOUTS = {
    "small packs": (ONE, 22),
    "dp2": (ParallelLayout(dp=2), 30),
    "tp2pp2": (ParallelLayout(tp=2, pp=2), 24),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pairs_give_one_loss_and_gradient_however_they_are_spread(
    tiny_qwen3: str, expected: dict[str, Any], name: str
):
    layout, tokens = LAYOUTS[name]
    result = run_ranks(
        measure, layout.world, tiny_qwen3, layout, pairs_batch(), micro_batch_tokens=tokens
    )[0]
    for case in (*CASES, *(f"masked {name}" for name in CASES), "held out"):
        assert result[case] == pytest.approx(expected[case], rel=1e-5, abs=1e-7), case


def one_kind(path: str, layout: ParallelLayout, batch: Batch) -> dict[str, float]:
    bad = batch.with_field("labels", Axis.SAMPLES, torch.zeros(batch.samples, dtype=torch.bool))
    return make_engine(path, layout, optimizer=STILL).update(bad, CASES["kto"])


def test_a_kind_without_a_response_has_no_metric(tiny_qwen3: str):
    (found,) = run_ranks(one_kind, 1, tiny_qwen3, ONE, pairs_batch())
    assert "undesirable_reward" in found
    assert found.keys().isdisjoint({"desirable_reward", "reward_margin"})


def test_fields_that_are_missing_are_named():
    batch = pairs_batch()
    cases = {
        "ref_logprobs": (batch.select(["prompts", "responses"]), "ipo"),
        "labels": (batch.select([*FIELDS, "kl_baseline"]), "kto"),
        "two responses to a prompt": (make_batch(), "simpo"),
    }
    for message, (given, loss) in cases.items():
        with pytest.raises(ValueError, match=message):
            check_fields(given, CASES[loss])
    empty = batch["responses"].take(range(7))
    responses = type(empty).from_rows([*empty.rows(), torch.zeros(0, dtype=torch.int64)])
    lacking = Batch(
        {"prompts": batch["prompts"], "responses": responses},
        {"prompts": Axis.PROMPTS, "responses": Axis.TOKENS},
        4,
        2,
    )
    with pytest.raises(ValueError, match="response 7 is empty"):
        check_fields(lacking, CASES["simpo"])
