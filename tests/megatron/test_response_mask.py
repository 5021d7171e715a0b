"""Tokens of a response that are not trained on: the loss of the others, however it is spread."""

from typing import Any

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.megatron.config import LossSettings, OptimizerSettings
from hybridflow.recipe.axes import Axis
from megatron_bridge.layout import ParallelLayout
from tests.megatron.cases import make_batch, make_engine, my_part
from tests.ranks import run_ranks

STILL = OptimizerSettings(lr=1e-30, clip_grad=0.0)
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")


def masked_batch() -> Batch:
    """About half of the tokens; a response may have none, a step's parts never."""
    batch = make_batch()
    responses = batch["responses"]
    generator = torch.Generator().manual_seed(5)
    mask_T = torch.rand(len(responses.values), generator=generator) < 0.5
    trained = torch.bincount(torch.repeat_interleave(responses.lengths)[mask_T], minlength=12)
    assert 0 in trained
    return batch.with_field("response_mask", Axis.TOKENS, responses.with_values(mask_T))


def measure(path: str, layout: ParallelLayout, batch: Batch, **options: Any) -> dict[str, Any]:
    engine = make_engine(path, layout, optimizer=STILL, **options)
    part = my_part(batch, layout)
    found: dict[str, Any] = {"logprobs": engine.logprobs(part)}
    for aggregation in AGGREGATIONS:
        loss = LossSettings(name="cross_entropy", aggregation=aggregation)
        found[aggregation] = engine.update(part, loss)
    found["held out"] = engine.evaluate(part, LossSettings(name="cross_entropy"))
    return found


@pytest.fixture(scope="module")
def expected(tiny_qwen3: str) -> dict[str, Any]:
    one = ParallelLayout()
    return run_ranks(measure, 1, tiny_qwen3, one, masked_batch(), micro_batch_tokens=999)[0]


def test_the_loss_is_that_of_the_trained_tokens(expected: dict[str, Any]):
    mask = masked_batch()["response_mask"]
    losses_T = -expected["logprobs"].values.double()
    token_mean = losses_T[mask.values].mean().item()
    assert expected["token_mean"]["loss"] == pytest.approx(token_mean, rel=1e-6)
    assert expected["token_mean"]["tokens"] == int(mask.values.sum())
    rows = zip(losses_T.split(mask.lengths.tolist()), mask.rows(), strict=True)
    kept = [row[trained] for row, trained in rows if trained.any()]
    sums, means = [row.sum().item() for row in kept], [row.mean().item() for row in kept]
    for name, values in {AGGREGATIONS[1]: means, AGGREGATIONS[2]: sums}.items():
        assert expected[name]["loss"] == pytest.approx(sum(values) / len(values), rel=1e-6)


def test_evaluating_measures_what_an_update_would(expected: dict[str, Any]):
    assert expected["held out"]["loss"] == pytest.approx(expected["token_mean"]["loss"], rel=1e-6)
    assert "grad_norm" not in expected["held out"]


@pytest.mark.parametrize(("layout", "tokens"), [(ParallelLayout(), 16), (ParallelLayout(dp=2), 23)])
def test_layouts_and_packs_change_nothing(
    tiny_qwen3: str, expected: dict[str, Any], layout: ParallelLayout, tokens: int
):
    result = run_ranks(
        measure, layout.world, tiny_qwen3, layout, masked_batch(), micro_batch_tokens=tokens
    )[-1]
    for case in (*AGGREGATIONS, "held out"):
        assert result[case] == pytest.approx(expected[case], rel=1e-5, abs=1e-7), case
