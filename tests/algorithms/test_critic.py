"""Advantages and losses of a critic: by hand, by a float64 loop, and beside verl's figures."""

import json
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.algorithms import FUNCTIONS, FunctionContext
from hybridflow.algorithms.advantages import gae, token_rewards, whiten
from hybridflow.algorithms.functions import GaeSettings
from hybridflow.algorithms.values import VALUE_LOSSES, ValueInputs, explained_variance
from hybridflow.batch import Batch, Ragged
from hybridflow.ragged import RUN
from hybridflow.recipe import catalogue
from hybridflow.recipe.axes import Axis

FIGURES = json.loads((Path(__file__).parent / "critic_figures.json").read_text())
INPUTS = {name: torch.tensor(values) for name, values in FIGURES["inputs"].items()}
TOLD = FIGURES["settings"]


def ragged(padded: Tensor | list[list[float]]) -> Ragged:
    """Rows of the figures without their padding."""
    rows = zip(torch.as_tensor(padded), FIGURES["lengths"], strict=True)
    return Ragged.from_rows([row[:length] for row, length in rows])


def loop(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16 of the paper, from the last token back."""
    found, following, ahead = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + gamma * ahead - value + gamma * lam * following
        ahead = value
        found.insert(0, following)
    return found


ROWS = st.lists(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), max_size=9), min_size=1, max_size=6
)


@settings(deadline=None, max_examples=60)
@given(ROWS, st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_gae_is_the_papers_recursion(rows, gamma, lam):
    rewards, values = (
        Ragged.from_rows([[pair[i] for pair in row] for row in rows], dtype=torch.float64)
        for i in (0, 1)
    )
    advantages, returns = gae(rewards, values, gamma, lam, whitened=False)
    expected = [loop(*map(list, zip(*row, strict=True)), gamma, lam) if row else [] for row in rows]
    wanted_T = torch.tensor([v for row in expected for v in row], dtype=torch.float64)
    torch.testing.assert_close(advantages.values.double(), wanted_T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        returns.values.double(), wanted_T + values.values, rtol=1e-5, atol=1e-5
    )


def test_gae_by_hand():
    # Row 0: deltas -0.25, 0.75 at gamma 1; the second response must not reach into the first.
    rewards, values = Ragged.from_rows([[0.0, 1.0], [2.0]]), Ragged.from_rows([[0.5, 0.25], [0.5]])
    advantages, returns = gae(rewards, values, gamma=1.0, lam=0.5, whitened=False)
    assert advantages.values.tolist() == [0.125, 0.75, 1.5]
    assert returns.values.tolist() == [0.625, 1.0, 2.0]
    discounted, _ = gae(rewards, values, gamma=0.5, lam=0.0, whitened=False)
    assert discounted.values.tolist() == [-0.375, 0.75, 1.5]


def test_lambda_one_is_the_return_less_the_value():
    rewards, values = ragged(INPUTS["token_rewards"]), ragged(INPUTS["values"])
    advantages, _ = gae(rewards, values, gamma=1.0, lam=1.0, whitened=False)
    for row in range(len(rewards)):
        to_go_T = rewards[row].flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(advantages[row], to_go_T - values[row])


def test_advantages_and_returns_are_verls():
    assert FIGURES["verl"] == "0.9.1"
    rewards, values = ragged(INPUTS["token_rewards"]), ragged(INPUTS["values"])
    advantages, returns = gae(rewards, values, TOLD["gamma"], TOLD["lam"])
    for given_, name in ((advantages, "advantages"), (returns, "returns")):
        wanted = ragged(FIGURES[name])
        torch.testing.assert_close(given_.values, wanted.values, rtol=1e-5, atol=1e-5)


def test_scaled_rewards_are_verls_and_keep_their_mean():
    rewards = ragged(INPUTS["token_rewards"])
    scaled_T = whiten(rewards.values, shift_mean=False)
    torch.testing.assert_close(scaled_T, ragged(FIGURES["scaled"]).values, rtol=1e-5, atol=1e-5)
    values = rewards.values.double().tolist()
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    expected = [(v - mean) / deviation + mean for v in values]
    torch.testing.assert_close(scaled_T, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert whiten(torch.full((3,), 0.7), shift_mean=False).tolist() == pytest.approx([0.7] * 3)


@pytest.mark.parametrize("estimator", FIGURES["token_rewards"])
def test_token_rewards_are_verls(estimator: str):
    found = token_rewards(
        INPUTS["rewards"],
        ragged(INPUTS["token_rewards"]),
        TOLD["kl_coef"],
        estimator,
        ragged(INPUTS["logprobs"]),
        ragged(INPUTS["ref_logprobs"]),
    )
    wanted = ragged(FIGURES["token_rewards"][estimator])
    torch.testing.assert_close(found.values, wanted.values, rtol=1e-5, atol=1e-6)


def test_token_rewards_by_hand():
    responses = Ragged.from_rows([[7, 7, 7], [7]])
    zero = responses.with_values(torch.zeros(4))
    gaps = responses.with_values(torch.tensor([0.1, 0.2, 0.3, -0.4]))
    found = token_rewards(torch.tensor([1.0, -1.0]), responses, 0.5, "k1", gaps, zero)
    torch.testing.assert_close(found.values, torch.tensor([-0.05, -0.1, 0.85, -0.8]))
    plain = token_rewards(torch.tensor([1.0, -1.0]), responses)
    assert plain.values.tolist() == [0, 0, 1, -1]
    with pytest.raises(ValueError, match="needs the log-probabilities of the policy"):
        token_rewards(torch.tensor([1.0, -1.0]), responses, 0.5)


def test_the_functions_read_the_recipes_settings():
    fields = {
        "rewards": INPUTS["rewards"],
        "responses": ragged(INPUTS["token_rewards"]),
        "logprobs": ragged(INPUTS["logprobs"]),
        "ref_logprobs": ragged(INPUTS["ref_logprobs"]),
        "values": ragged(INPUTS["values"]),
    }
    axes = dict.fromkeys(fields, Axis.TOKENS) | {"rewards": Axis.SAMPLES}
    batch = Batch(fields, axes, len(FIGURES["lengths"]), 1)
    told = GaeSettings(0.9, 0.8, whiten_rewards=True, whiten_advantages=False)
    context = FunctionContext(kl_coef=0.1, kl_estimator="k2", gae=told)
    rewards = FUNCTIONS["token_rewards"](batch, context)["token_rewards"]
    kl = (fields["logprobs"], fields["ref_logprobs"])
    by_hand = token_rewards(fields["rewards"], fields["responses"], 0.1, "k2", *kl, whitened=True)
    assert torch.equal(rewards.values, by_hand.values)
    batch = batch.with_field("token_rewards", Axis.TOKENS, rewards)
    given_ = FUNCTIONS["gae"](batch, context)
    advantages, returns = gae(rewards, fields["values"], 0.9, 0.8, whitened=False)
    assert given_["advantages"].equals(advantages) and given_["returns"].equals(returns)
    whitened = FUNCTIONS["gae"](batch, context, whiten=True)["advantages"]
    assert whitened.values.mean().abs() < 1e-6 and not whitened.equals(advantages)


def test_the_clipped_value_loss_is_verls():
    values_T = ragged(INPUTS["new_values"]).values.requires_grad_()
    returns_T, old_T = ragged(INPUTS["token_rewards"]).values, ragged(INPUTS["values"]).values
    result = VALUE_LOSSES["value_clip"](ValueInputs(values_T, returns_T, old_T, TOLD["clip"]))
    loss = result.loss_T.mean()
    loss.backward()
    figure = FIGURES["value_clip"]
    assert loss.item() == pytest.approx(figure["loss"], rel=1e-5)
    assert result.sums["clip_fraction"].item() / len(values_T) == pytest.approx(
        figure["clip_fraction"]
    )
    assert values_T.grad is not None and 0 < figure["clip_fraction"] < 1
    wanted_T = ragged(figure["gradient"]).values
    torch.testing.assert_close(values_T.grad, wanted_T, rtol=1e-5, atol=1e-7)


def test_value_losses_by_hand():
    values_T = torch.tensor([1.0, 1.0, 0.1], requires_grad=True)
    returns_T, old_T = torch.tensor([3.0, 0.0, 0.0]), torch.tensor([0.5, 0.5, 0.0])
    # Held within 0.2 of the old value: 0.7 is worse than 1 where the return is 3, and better where
    # it is 0: the loss takes the worse of the two, without a gradient where that is the held one.
    clipped = VALUE_LOSSES["value_clip"](ValueInputs(values_T, returns_T, old_T, clip=0.2)).loss_T
    torch.testing.assert_close(clipped, torch.tensor([2.645, 0.5, 0.005]))
    (grad_T,) = torch.autograd.grad(clipped.sum(), values_T)
    torch.testing.assert_close(grad_T, torch.tensor([0.0, 1.0, 0.1]))
    plain = VALUE_LOSSES["value_mse"](ValueInputs(values_T, returns_T)).loss_T
    torch.testing.assert_close(plain, torch.tensor([2.0, 0.5, 0.005]))


def test_values_within_their_bounds_keep_their_gradient():
    """In float32, whose roundings must not pass for a bound."""
    torch.manual_seed(0)
    values_T = (0.05 * torch.randn(5000)).requires_grad_()
    old_T, returns_T = values_T.detach() + 0.05 * torch.randn(5000), torch.randn(5000)
    result = VALUE_LOSSES["value_clip"](ValueInputs(values_T, returns_T, old_T, clip=0.3))
    result.loss_T.sum().backward()
    torch.testing.assert_close(values_T.grad, values_T.detach() - returns_T)
    assert result.sums["clip_fraction"] == 0


def test_explained_variance():
    returns_T = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns_T, returns_T) == 1
    assert explained_variance(torch.full((4,), 9.0), returns_T) == 0
    assert explained_variance(-returns_T, returns_T) == pytest.approx(-3)  # 1 - 4 of variance 1
    assert explained_variance(returns_T, torch.ones(4)) == 0


def test_the_catalogue_and_the_value_losses_agree():
    assert set(catalogue.VALUE_LOSSES) == set(VALUE_LOSSES)
    for name, entry in catalogue.VALUE_LOSSES.items():
        assert ("values" in entry.needs) == VALUE_LOSSES[name].needs_old_values


@pytest.mark.parametrize("gamma", [1.0, 0.99])
def test_a_batch_of_many_runs_is_that_of_its_rows(gamma: float):
    """Rows around and beyond what is worked on at a time, empty ones among them."""
    torch.manual_seed(1)
    lengths = [0, RUN + 7, 3, 0, RUN - 2, 65, 64, 1, 0]
    rewards = Ragged.from_rows([torch.randn(n) for n in lengths])
    values = rewards.with_values(torch.randn(len(rewards.values)))
    advantages, returns = gae(rewards, values, gamma, 1.0, whitened=False)
    spans = list(rewards.runs())
    assert len(spans) > 1 and [spans[0][0].start, spans[-1][0].stop] == [0, len(lengths)]
    for row in range(len(lengths)):
        alone = slice(row, row + 1)
        one = gae(rewards[alone], values[alone], gamma, 1.0, whitened=False)
        torch.testing.assert_close(advantages[row], one[0].values)
        torch.testing.assert_close(returns[row], one[1].values)
    whole, _ = gae(rewards, values, gamma, 1.0)
    wanted_T = advantages.values.double() - advantages.values.double().mean()
    torch.testing.assert_close(
        whole.values.double(), wanted_T / wanted_T.std(), rtol=1e-4, atol=1e-4
    )


def test_inputs_are_left_as_they_were():
    rewards = Ragged.from_rows([[0.0, 1.0], [2.0]], dtype=torch.float64)
    values = rewards.with_values(rewards.values + 0.5)
    gae(rewards, values, 1.0, 0.5)
    whiten(values.values)
    assert rewards.values.tolist() == [0.0, 1.0, 2.0] and values.values.tolist() == [0.5, 1.5, 2.5]


@pytest.mark.parametrize("lam", [1.0, 0.95])
def test_a_huge_reward_spoils_no_other_response(lam: float):
    rewards = Ragged.from_rows([[1e30, 0.0, 0.0], [1.0, 2.0, 3.0], [float("nan")], [4.0]])
    values = rewards.with_values(torch.zeros(8))
    found, returns = gae(rewards, values, 1.0, lam, whitened=False)
    alone, _ = gae(rewards[1:2], values[1:2], 1.0, lam, whitened=False)
    assert torch.equal(found[1], alone.values) and found[3].tolist() == [4.0]
    assert returns[0][0].item() == pytest.approx(1e30) and found[2].isnan().all()
    if lam == 1:
        assert found[1].tolist() == [6.0, 5.0, 3.0]
