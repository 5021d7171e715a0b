"""Losses of whole responses: against TRL's figures, the papers' formulas in float64, by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hybridflow.algorithms import FUNCTIONS, PREFERENCES, FunctionContext
from hybridflow.algorithms.losses.preference import PreferenceSettings, Responses
from hybridflow.algorithms.rewards_math import kl_baseline
from hybridflow.batch import Batch, Ragged
from hybridflow.recipe import catalogue, schema_algorithm
from hybridflow.recipe.axes import Axis

FIGURES = json.loads((Path(__file__).parent / "preference_figures.json").read_text())
INPUTS, LABELS = FIGURES["inputs"], FIGURES["labels"]
BETA, GAMMA = FIGURES["settings"]["beta"], FIGURES["settings"]["gamma"]
SETTINGS = PreferenceSettings(
    beta=BETA,
    target_margin=GAMMA,
    odds_weight=BETA,
    desirable_weight=FIGURES["settings"]["weights"][0],
    undesirable_weight=FIGURES["settings"]["weights"][1],
)


def responses_of(dtype: torch.dtype = torch.float32) -> Responses:
    def sums(name: str) -> torch.Tensor:
        return torch.tensor([math.fsum(row) for row in INPUTS[name]], dtype=dtype)

    return Responses(
        logprobs_S=sums("policy").requires_grad_(),
        lengths_S=torch.tensor([len(row) for row in INPUTS["policy"]]),
        ref_logprobs_S=sums("reference"),
        labels_S=torch.tensor(LABELS),
        kl_baseline=kl_baseline(
            *(Ragged.from_rows(INPUTS[n]) for n in ("drift", "drift_reference"))
        ),
    )


@pytest.mark.parametrize("name", FIGURES["losses"])
def test_trl_gives_the_same(name: str):
    found = PREFERENCES[name](responses_of(), SETTINGS)
    for key, figure in FIGURES["losses"][name].items():
        ours = found.loss_N if key == "loss" else found.metrics[key]
        assert ours.mean().item() == pytest.approx(figure, rel=1e-5), key
    assert set(found.metrics) == set(PREFERENCES[name].metrics)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_the_paper(name: str, s: PreferenceSettings, smoothing: float = 0.0) -> list[float]:
    """The losses of every pair or response, in plain floats."""
    sums = [math.fsum(row) for row in INPUTS["policy"]]
    reference = [math.fsum(row) for row in INPUTS["reference"]]
    lengths = [len(row) for row in INPUTS["policy"]]
    if name == "kto":
        drift = [
            math.fsum(a) - math.fsum(b)
            for a, b in zip(INPUTS["drift"], INPUTS["drift_reference"], strict=True)
        ]
        z = max(0.0, math.fsum(drift) / len(drift))
        weights = {True: s.desirable_weight, False: s.undesirable_weight}
        return [
            weights[good] * (1 - sigmoid(s.beta * ((r - q - z) if good else (z - r + q))))
            for r, q, good in zip(sums, reference, LABELS, strict=True)
        ]
    if name == "prime":
        rewards = [s.beta * (r - q) for r, q in zip(sums, reference, strict=True)]
        signed = [r if good else -r for r, good in zip(rewards, LABELS, strict=True)]
        return [-math.log(sigmoid(r)) for r in signed]
    losses = []
    for good, bad in ((0, 1), (2, 3), (4, 5)):
        h = sums[good] - reference[good] - sums[bad] + reference[bad]
        mean_w, mean_l = sums[good] / lengths[good], sums[bad] / lengths[bad]
        if name == "dpo":
            right, wrong = (math.log(sigmoid(sign * s.beta * h)) for sign in (1, -1))
            losses.append(-(1 - smoothing) * right - smoothing * wrong)
        elif name == "ipo":
            if s.by_length:
                h = mean_w - reference[good] / lengths[good]
                h -= mean_l - reference[bad] / lengths[bad]
            losses.append((h - 1 / (2 * s.beta)) ** 2)
        elif name == "simpo":
            margin = s.beta * mean_w - s.beta * mean_l - s.target_margin
            losses.append(-math.log(sigmoid(margin)))
        else:
            odds = [math.exp(m) / (1 - math.exp(m)) for m in (mean_w, mean_l)]
            ratio = math.log(sigmoid(math.log(odds[0] / odds[1])))
            losses.append(-mean_w - s.odds_weight * ratio)
    return losses


@pytest.mark.parametrize("name", PREFERENCES)
def test_the_papers_formula_in_double_precision(name: str):
    exact = PREFERENCES[name](responses_of(torch.float64), SETTINGS).loss_N
    assert exact.tolist() == pytest.approx(by_the_paper(name, SETTINGS), rel=1e-12)
    single = responses_of()
    loss_N = PREFERENCES[name](single, SETTINGS).loss_N
    assert loss_N.tolist() == pytest.approx(exact.tolist(), rel=1e-5)
    double = responses_of(torch.float64)
    PREFERENCES[name](double, SETTINGS).loss_N.sum().backward()
    loss_N.sum().backward()
    assert gradient(single) == pytest.approx(gradient(double), rel=1e-4)


def gradient(responses: Responses) -> list[float]:
    grad_S = responses.logprobs_S.grad
    assert grad_S is not None
    return grad_S.tolist()


def test_ipo_as_its_equation_has_it():
    settings = PreferenceSettings(beta=BETA, by_length=False)
    found = PREFERENCES["ipo"](responses_of(torch.float64), settings).loss_N
    assert found.tolist() == pytest.approx(by_the_paper("ipo", settings), rel=1e-12)


def test_labels_that_may_be_wrong():
    settings = PreferenceSettings(beta=BETA, label_smoothing=0.2)
    found = PREFERENCES["dpo"](responses_of(torch.float64), settings).loss_N
    assert found.tolist() == pytest.approx(by_the_paper("dpo", settings, 0.2), rel=1e-12)


def test_by_hand():
    """Policy and reference alike: every margin is 0."""
    same = Responses(
        logprobs_S=torch.tensor([-2.0, -2.0]),
        lengths_S=torch.tensor([2, 2]),
        ref_logprobs_S=torch.tensor([-2.0, -2.0]),
        labels_S=torch.tensor([True, False]),
        kl_baseline=0.0,
    )
    settings = PreferenceSettings(beta=0.5, target_margin=0.0, odds_weight=1.0)
    losses = {n: PREFERENCES[n](same, settings).loss_N.tolist() for n in PREFERENCES}
    assert losses["dpo"] == pytest.approx([math.log(2)])
    assert losses["simpo"] == pytest.approx([math.log(2)])
    assert losses["ipo"] == pytest.approx([1.0])
    assert losses["orpo"] == pytest.approx([1 + math.log(2)])
    assert losses["kto"] == pytest.approx([0.5, 0.5])


def test_a_baseline_is_of_the_models_own_tokens():
    logprobs = Ragged.from_rows([[-1.0, -2.0], [-0.5, -3.0]])
    zero = logprobs.with_values(torch.zeros(4))
    fields = {
        "logprobs": zero,
        "ref_logprobs": logprobs,
        "response_mask": logprobs.with_values(torch.tensor([True, False, True, False])),
    }
    batch = Batch(fields, dict.fromkeys(fields, Axis.TOKENS), prompts=2)
    masked = FUNCTIONS["kto_baseline"](batch, FunctionContext())["kl_baseline"]
    whole = FUNCTIONS["kto_baseline"](batch.select(list(fields)[:2]), FunctionContext())
    assert (masked, whole["kl_baseline"]) == (0.75, 3.25)


@given(st.floats(-80, 0), st.floats(-80, 0))
@example(0.0, -1.0)  # a response of which the model is sure
def test_odds_are_finite_at_both_ends(chosen: float, rejected: float):
    pair = Responses(torch.tensor([chosen, rejected]).requires_grad_(), torch.tensor([1, 1]))
    loss_N = PREFERENCES["orpo"](pair, PreferenceSettings()).loss_N
    loss_N.sum().backward()
    assert loss_N.isfinite().all() and all(map(math.isfinite, gradient(pair)))


def test_responses_rotate_to_the_next_prompt():
    responses = Ragged.from_rows([[1], [2, 2], [3, 3, 3]])
    batch = Batch({"responses": responses}, {"responses": Axis.TOKENS}, 3, 1)
    rotated = FUNCTIONS["rotate_responses"](batch, FunctionContext())["rotated"]
    assert [row.tolist() for row in rotated.rows()] == [[3, 3, 3], [1], [2, 2]]
    mask = Ragged.from_rows([[True], [True, False], [False, False, True]])
    masked = FUNCTIONS["rotate_responses"](
        batch.with_field("response_mask", Axis.TOKENS, mask), FunctionContext()
    )
    assert masked["rotated"].equals(rotated)
    assert [row.tolist() for row in masked["rotated_mask"].rows()][0] == [False, False, True]
    with pytest.raises(ValueError, match="two prompts a step or more"):
        FUNCTIONS["rotate_responses"](batch.slice(0, 1), FunctionContext())


def test_the_baseline_is_never_negative():
    low, high = Ragged.from_rows([[-1.0], [-2.0, -1.0]]), Ragged.from_rows([[-3.0], [-2.0, -2.0]])
    assert kl_baseline(low, high) == pytest.approx(1.5) and kl_baseline(high, low) == 0
    mine = Ragged.from_rows([[True], [False, True]])
    assert kl_baseline(low, high, mine) == pytest.approx((2 + 1) / 2), "of the model's own tokens"


def test_the_catalogue_says_the_same():
    for name, entry in PREFERENCES.items():
        known: Any = catalogue.LOSSES[name]
        assert (known.samples == 2, known.needs) == (entry.pairs, entry.needs), name
    section = schema_algorithm.PreferenceSection()
    assert PreferenceSettings(**section.model_dump()) == PreferenceSettings()
