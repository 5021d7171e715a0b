"""Pairs of a reward model give one loss and gradient, however they are spread and packed."""

from typing import Any

import pytest
import torch

from hybridflow.algorithms.losses.reward_model import SCORE_LOSSES
from hybridflow.batch import Batch
from hybridflow.megatron.config import OptimizerSettings, ValueLossSettings
from hybridflow.recipe.axes import Axis
from hybridflow.workers import model
from megatron_bridge.layout import ParallelLayout
from tests.megatron.cases import make_engine, my_part
from tests.megatron.test_preference import pairs_batch
from tests.ranks import run_ranks

STILL = OptimizerSettings(lr=1e-30, clip_grad=0.0)


def scored_batch() -> Batch:
    margins_P = torch.tensor([0.0, 0.3, 0.1, 0.7])
    return model.with_margins(pairs_batch().with_field("margins", Axis.PROMPTS, margins_P))


def measure(path: str, layout: ParallelLayout, batch: Batch, tokens: int) -> dict[str, Any]:
    engine = make_engine(path, layout, optimizer=STILL, head="value", micro_batch_tokens=tokens)
    part = my_part(batch, layout)
    losses = {name: ValueLossSettings(name=name) for name in SCORE_LOSSES}
    found = {name: engine.update_scores(part, loss) for name, loss in losses.items()}
    return found | {"held out": engine.evaluate_scores(part, losses["bradley_terry"])}


@pytest.mark.parametrize(
    ("layout", "tokens"), [(ParallelLayout(dp=2), 24), (ParallelLayout(tp=2, pp=2), 30)]
)
def test_layouts_and_packs_change_nothing(tiny_qwen3: str, layout: ParallelLayout, tokens: int):
    (expected,) = run_ranks(measure, 1, tiny_qwen3, ParallelLayout(), scored_batch(), 999)
    result = run_ranks(measure, layout.world, tiny_qwen3, layout, scored_batch(), tokens)[0]
    for case, metrics in expected.items():
        assert result[case] == pytest.approx(metrics, rel=1e-5, abs=1e-7), case
    assert expected["bradley_terry"]["loss"] == expected["held out"]["loss"]
    assert expected["bradley_terry"]["loss"] != expected["bradley_terry_token"]["loss"]
    # What the margins are: of a model that scores nearly 0, log(1 + e^margin).
    margins_P = scored_batch()["margins"].double()
    by_hand = torch.log1p(margins_P.exp()).mean().item()
    assert expected["bradley_terry"]["loss"] == pytest.approx(by_hand, abs=0.05) and by_hand > 0.8
