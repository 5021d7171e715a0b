"""Advantages, losses, gradients and aggregation beside what verl's functions of the name give.

``make_reference_figures.py`` wrote the figures, in verl's own environment.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms import AGGREGATIONS, FUNCTIONS, LOSSES, FunctionContext
from hybridflow.algorithms.aggregation import token_weights
from hybridflow.algorithms.correction import correct
from hybridflow.algorithms.losses import Sequences, TokenInputs
from hybridflow.batch import Batch, Ragged
from hybridflow.recipe.axes import Axis

FIGURES = json.loads((Path(__file__).parent / "reference_figures.json").read_text())
INPUTS = {name: torch.tensor(values) for name, values in FIGURES["inputs"].items()}
LENGTHS_S = torch.tensor(FIGURES["lengths"])
GROUP = FIGURES["group"]
ADVANTAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "group_relative": ("group_relative", {}),
    "rloo": ("rloo", {}),
    "remax": ("remax", {}),
    "opo": ("opo", {}),
    "reinforce_pp": ("reinforce_pp", {}),
    "reinforce_pp_discounted": ("reinforce_pp", {"gamma": 0.9}),
    "reinforce_pp_baseline": ("reinforce_pp_baseline", {}),
    "gdpo": ("gdpo", {"weights": [1.0, 0.5]}),
}


def flat(padded: Tensor) -> Tensor:
    """Rows of the figures without their padding, end to end."""
    return torch.cat([row[:length] for row, length in zip(padded, LENGTHS_S, strict=True)])


def ragged(values_T: Tensor) -> Ragged:
    return Ragged(values_T, torch.cat([LENGTHS_S.new_zeros(1), LENGTHS_S.cumsum(0)]))


def batch() -> Batch:
    fields = {
        "rewards": INPUTS["rewards"],
        "first": INPUTS["rewards"],
        "second": INPUTS["second"],
        "baseline": INPUTS["second"][::GROUP],
        "responses": ragged(torch.zeros(int(LENGTHS_S.sum()), dtype=torch.int64)),
    }
    axes = dict.fromkeys(fields, Axis.SAMPLES) | {
        "responses": Axis.TOKENS,
        "baseline": Axis.PROMPTS,
    }
    return Batch(fields, axes, len(LENGTHS_S) // GROUP, GROUP)


def test_every_figure_is_of_the_stated_version():
    assert FIGURES["verl"] == "0.9.1"
    assert set(FIGURES["advantages"]) == set(ADVANTAGES)
    assert set(FIGURES["aggregation"]) == set(AGGREGATIONS)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages(name: str):
    function, options = ADVANTAGES[name]
    given = FUNCTIONS[function](batch(), FunctionContext(), **options)["advantages"]
    wanted = torch.tensor(FIGURES["advantages"][name])
    if name == "gdpo":  # verl counts a sample once per token; the figures have one token each
        torch.testing.assert_close(given, wanted[:, 0], rtol=1e-5, atol=1e-5)
        return
    given_T = given.values if isinstance(given, Ragged) else given.repeat_interleave(LENGTHS_S)
    torch.testing.assert_close(given_T, flat(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FIGURES["losses"])
def test_losses_and_gradients(name: str):
    figure = FIGURES["losses"][name]
    options = figure["options"]
    logprobs_T = flat(INPUTS["logprobs"]).requires_grad_()
    result = LOSSES[name](
        TokenInputs(
            logprobs_T=logprobs_T,
            old_logprobs_T=flat(INPUTS["old_logprobs"]),
            advantages_T=INPUTS["advantages"].repeat_interleave(LENGTHS_S),
            clip_low=options.get("clip_ratio_low", 0.2),
            clip_high=options.get("clip_ratio_high", 0.2),
            dual_clip=options.get("clip_ratio_c", 3.0),
            tau_positive=options.get("tau_pos", 1.0),
            tau_negative=options.get("tau_neg", 1.05),
            sequences=Sequences(torch.arange(6).repeat_interleave(LENGTHS_S), LENGTHS_S),
        )
    )
    weights_T, share = token_weights("sequence_mean_token_mean", LENGTHS_S)
    loss = (weights_T * result.loss_T).sum() / share
    loss.backward()
    assert logprobs_T.grad is not None and logprobs_T.grad.any()
    assert loss.item() == pytest.approx(figure["loss"], rel=1e-5)
    torch.testing.assert_close(
        logprobs_T.grad, flat(torch.tensor(figure["gradient"])), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("name", FIGURES["corrections"])
def test_corrections(name: str):
    method, level = name.split()
    low, high = (0.9, 1.2) if method == "rejection" else (0.7, 1.4)
    sequences = Sequences(torch.arange(6).repeat_interleave(LENGTHS_S), LENGTHS_S)
    trainer_T, rollout_T = flat(INPUTS["logprobs"]), flat(INPUTS["old_logprobs"])
    given = correct(trainer_T, rollout_T, sequences, method, level, low, high)
    wanted_T = flat(torch.tensor(FIGURES["corrections"][name]["weights"]))
    assert 0 < given.corrected_T.sum() < len(wanted_T)
    torch.testing.assert_close(given.weights_T, wanted_T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregation(name: str):
    weights_T, share = token_weights(name, LENGTHS_S, divisor=8)
    given = (weights_T * flat(INPUTS["token_losses"])).sum() / share
    assert given.item() == pytest.approx(FIGURES["aggregation"][name], rel=1e-5)
