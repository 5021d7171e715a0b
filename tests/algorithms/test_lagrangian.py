"""Safe RLHF's multiplier and advantage against values worked by hand and the paper's formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms import FUNCTIONS, FunctionContext
from hybridflow.algorithms.functions import GaeSettings
from hybridflow.algorithms.lagrangian import combined_advantages, next_multiplier
from hybridflow.batch import Batch, Ragged
from hybridflow.recipe.axes import Axis


def test_the_multiplier_by_hand():
    assert next_multiplier(2.0, 0.7, 0.2, 0.1) == pytest.approx(2 * math.e**0.1)
    assert next_multiplier(1.0, 0.0, 0.5, 0.2) == pytest.approx(math.e**-0.1)
    assert next_multiplier(3.0, 0.5, 0.5, 9.0) == 3.0
    assert math.isfinite(next_multiplier(10.0, 1e9, 0.0, 1.0))


@settings(deadline=None)
@given(st.floats(1e-3, 20), st.floats(-3, 3), st.floats(-1, 1), st.floats(0.001, 0.5))
def test_the_multiplier_ascends_its_gradient(multiplier, cost, limit, rate):
    """The derivative of lambda * J_C by ln lambda is lambda * J_C."""
    found = next_multiplier(multiplier, cost, limit, rate)
    expected = math.log(multiplier) + rate * multiplier * (cost - limit)
    assert found > 0 and math.log(found) == pytest.approx(expected, abs=1e-9)


def test_advantages_by_hand():
    one = Ragged.from_rows([[1.0, -2.0], [0.5]])
    other = one.with_values(torch.tensor([0.5, 0.5, -1.0]))
    mixed = combined_advantages(one, other, 3.0, whitened=False)
    assert mixed.values.tolist() == [-0.125, -0.875, 0.875]
    assert combined_advantages(one, other, 0.0, whitened=False).equals(one)
    whitened_T = combined_advantages(one, other, 3.0).values
    assert whitened_T.mean().abs() < 1e-6
    assert whitened_T.std() == pytest.approx(1, rel=1e-5)


def test_a_share_of_the_kl_goes_into_reward_and_cost():
    """The paper takes half of it out of the reward and adds half to the cost, so that the
    combination holds half of it whatever lambda is."""
    responses = Ragged.from_rows([[7, 7]])
    logprobs = responses.with_values(torch.tensor([-1.0, -2.0]))
    reference = responses.with_values(torch.tensor([-1.5, -1.0]))
    fields = {"responses": responses, "logprobs": logprobs, "ref_logprobs": reference}
    axes = dict.fromkeys(fields, Axis.TOKENS)
    batch = Batch(fields, axes, 1, 1).with_field("rewards", Axis.SAMPLES, torch.zeros(1))
    context = FunctionContext(kl_coef=0.4, kl_estimator="k1", multiplier=3.0)
    tokens = FUNCTIONS["token_rewards"]
    rewards, costs = (
        tokens(batch, context, kl_share=share)["token_rewards"] for share in (0.5, -0.5)
    )
    torch.testing.assert_close(rewards.values, torch.tensor([-0.1, 0.2]))
    mixed = combined_advantages(rewards, costs, 3.0, whitened=False)
    torch.testing.assert_close(mixed.values, rewards.values)


def test_the_function_reads_the_live_multiplier():
    one = Ragged.from_rows([[1.0, -2.0], [0.5]])
    other = one.with_values(torch.tensor([0.5, 0.5, -1.0]))
    fields = {"advantages": one, "cost_advantages": other}
    batch = Batch(fields, dict.fromkeys(fields, Axis.TOKENS), 2, 1)
    context = FunctionContext(multiplier=3.0, gae=GaeSettings(whiten_advantages=False))
    combined = FUNCTIONS["lagrangian"](batch, context)["combined"]
    assert combined.values.tolist() == [-0.125, -0.875, 0.875]
