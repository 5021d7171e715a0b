"""Advantages without a critic against values worked by hand and the papers' formulas in float64."""

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms import FUNCTIONS, FunctionContext
from hybridflow.algorithms.advantages import (
    decoupled_rewards,
    group_policy_gradient,
    leave_one_out,
    minus_baseline,
    optimal_baseline,
    reinforce_pp,
    reinforce_pp_baseline,
    whiten,
)
from hybridflow.batch import Batch, Ragged
from hybridflow.recipe.axes import Axis


def responses_of(lengths: list[int]) -> Ragged:
    return Ragged.from_rows([[0] * length for length in lengths], dtype=torch.int64)


def whitened(values: list[float], counts: list[int]) -> list[float]:
    """Mean 0 and variance 1 over the values, each repeated; the float64 twin of ``whiten``."""
    repeated = [v for v, n in zip(values, counts, strict=True) for _ in range(n)]
    mean, variance = statistics.fmean(repeated), statistics.variance(repeated)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def test_leave_one_out_by_hand():
    # Row 0: the others of a 1 have mean 1/3, those of a 0 have 2/3.
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.3, 0.3, 0.3, 0.3]])
    third = 2 / 3
    expected = torch.tensor([[third, -third, -third, third], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(leave_one_out(rewards_PG), expected)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=1, max_size=4))
def test_leave_one_out_is_the_mean_of_the_others(rows):
    expected = [[r - (sum(row) - r) / 2 for r in row] for row in rows]
    given_PG = leave_one_out(torch.tensor(rows))
    torch.testing.assert_close(given_PG, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_a_greedy_baseline_by_hand():
    batch = Batch(
        {"rewards": torch.tensor([1.0, 0.0, 0.5, 3.0]), "baseline": torch.tensor([1.0, -2.0])},
        {"rewards": Axis.SAMPLES, "baseline": Axis.PROMPTS},
        prompts=2,
        samples_per_prompt=2,
    )
    given = FUNCTIONS["remax"](batch, FunctionContext())["advantages"]
    assert given.tolist() == [0.0, -1.0, 2.5, 5.0]
    with pytest.raises(ValueError, match=r"baseline must be \[2\], one value a prompt, got \(4,\)"):
        minus_baseline(torch.zeros(2, 2), torch.zeros(4))


def test_the_mean_of_each_prompt():
    values = torch.tensor([1.0, 3.0, 5.0, 6.0])
    batch = Batch({"values": values}, {"values": Axis.SAMPLES}, 2, 2)
    means = FUNCTIONS["prompt_mean"](batch, FunctionContext())["means"]
    assert means.tolist() == [2.0, 5.5]


def test_optimal_baseline_by_hand():
    # Row 0: the baseline is (1 * 1 + 0 * 3) / 4. Row 1: nothing differs. Row 2: no tokens at all.
    rewards_PG = torch.tensor([[1.0, 0.0], [0.1, 0.1], [2.0, 4.0]])
    given_PG = optimal_baseline(rewards_PG, torch.tensor([[1, 3], [5, 7], [0, 0]]))
    torch.testing.assert_close(given_PG, torch.tensor([[0.75, -0.25], [0.0, 0.0], [2.0, 4.0]]))


def test_the_optimal_baseline_weighs_every_token_alike():
    rewards_PG, lengths_PG = torch.rand(4, 5), torch.randint(1, 9, (4, 5))
    weighted_P = (optimal_baseline(rewards_PG, lengths_PG) * lengths_PG).sum(dim=1)
    torch.testing.assert_close(weighted_P, torch.zeros(4), atol=1e-5, rtol=0)


def test_group_policy_gradient_makes_up_for_groups_without_signal():
    rewards_PG = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [3.0, 2.0]])
    expected = torch.tensor([[1.0, -1.0], [0.0, 0.0], [0.0, 0.0], [1.0, -1.0]])  # alpha = 8 / 4
    torch.testing.assert_close(group_policy_gradient(rewards_PG), expected)
    assert not group_policy_gradient(torch.ones(3, 2)).any()


def test_whiten():
    given_N = whiten(torch.tensor([1.0, 2.0, 6.0]))
    torch.testing.assert_close(given_N, torch.tensor(whitened([1, 2, 6], [1, 1, 1])))
    counted_N = whiten(torch.tensor([1.0, 9.0, 6.0]), torch.tensor([2, 0, 3]))
    torch.testing.assert_close(counted_N, torch.tensor(whitened([1, 9, 6], [2, 0, 3])))
    assert not whiten(torch.full((7,), 0.1)).any()
    assert not whiten(torch.tensor([4.0])).any()
    assert whiten(torch.tensor([1.0, float("nan")])).isnan().all()


def test_reinforce_pp_without_discount_whitens_outcomes_over_tokens():
    given = reinforce_pp(torch.tensor([1.0, 0.0, 0.5]), responses_of([2, 3, 1]))
    values = whitened([1.0, 0.0, 0.5], [2, 3, 1])
    expected = torch.tensor(values).repeat_interleave(torch.tensor([2, 3, 1]))
    torch.testing.assert_close(given.values, expected)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.floats(-2, 2), st.integers(0, 9)), min_size=1, max_size=6),
    st.floats(0.5, 1.0),
    st.floats(0.01, 1.0),
    st.integers(0, 99),
)
def test_reinforce_pp_is_the_sum_of_discounted_rewards(samples, gamma, kl_coef, seed):
    rewards, lengths = zip(*samples, strict=True)
    responses = responses_of(list(lengths))
    generator = torch.Generator().manual_seed(seed)
    logp, ref = (
        responses.with_values(torch.rand(sum(lengths), generator=generator) - 2) for _ in "ab"
    )
    given = reinforce_pp(torch.tensor(rewards), responses, gamma, kl_coef, "k1", logp, ref)
    returns = []
    for row, reward in enumerate(rewards):
        gaps = (logp[row].double() - ref[row].double()).tolist()
        token_rewards = [-kl_coef * gap for gap in gaps]
        if token_rewards:
            token_rewards[-1] += reward
        for start in range(len(gaps)):
            late = token_rewards[start:]
            returns.append(sum(r * gamma**k for k, r in enumerate(late)))
    if len(returns) < 2:
        assert not given.values.any()
        return
    expected = torch.tensor(whitened(returns, [1] * len(returns)))
    torch.testing.assert_close(given.values, expected, rtol=2e-3, atol=2e-3)


def test_the_kl_in_the_reward_needs_both_policies():
    with pytest.raises(ValueError, match="give both to the function, or set kl_coef to 0"):
        reinforce_pp(torch.ones(1), responses_of([2]), kl_coef=0.1)


def test_reinforce_pp_baseline_by_hand():
    # Centred: 0.5, -0.5 of 1 and 3 tokens, then 1, -1 of 2 and 2.
    rewards_PG = torch.tensor([[1.0, 0.0], [3.0, 1.0]])
    given_PG = reinforce_pp_baseline(rewards_PG, torch.tensor([[1, 3], [2, 2]]))
    expected = torch.tensor(whitened([0.5, -0.5, 1.0, -1.0], [1, 3, 2, 2])).view(2, 2)
    torch.testing.assert_close(given_PG, expected)


def test_decoupled_rewards_by_hand():
    # Normalised, [0, 1] is -+1 / sqrt 2 whatever the scale; a reward of equal values adds nothing.
    first, second = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[30.0, 0.0], [7.0, 7.0]])
    half = 0.5**0.5
    summed = [-half + 0.5 * half, half - 0.5 * half, -half, half]
    expected = torch.tensor(whitened(summed, [1] * 4)).view(2, 2)
    given_PG = decoupled_rewards([first, second], [1.0, 0.5])
    torch.testing.assert_close(given_PG, expected, rtol=1e-5, atol=1e-5)
    assert not decoupled_rewards([torch.ones(2, 2)] * 2).any()
    with pytest.raises(ValueError, match="1 entries for 2 rewards"):
        decoupled_rewards([first, second], [1.0])


def test_one_sample_per_prompt_is_an_error():
    one = torch.ones(3, 1)
    for compute in (
        lambda: leave_one_out(one),
        lambda: optimal_baseline(one, one),
        lambda: group_policy_gradient(one),
        lambda: reinforce_pp_baseline(one, one),
        lambda: decoupled_rewards([one, one]),
    ):
        with pytest.raises(ValueError, match="set data.samples_per_prompt to 2 or more"):
            compute()
    with pytest.raises(ValueError, match="prompts, samples"):
        leave_one_out(torch.zeros(4))


def test_functions_of_a_batch():
    fields = {
        "rewards": torch.tensor([1.0, 0.0, 2.0, 2.0]),
        "first": torch.tensor([1.0, 0.0, 2.0, 2.0]),
        "second": torch.tensor([0.0, 1.0, 0.0, 4.0]),
        "responses": responses_of([1, 3, 2, 2]),
    }
    axes = dict.fromkeys(fields, Axis.SAMPLES) | {"responses": Axis.TOKENS}
    batch = Batch(fields, axes, 2, 2)

    def of(name: str, **options: Any) -> Any:
        return FUNCTIONS[name](batch, FunctionContext(), **options)["advantages"]

    assert torch.equal(of("rloo"), torch.tensor([1.0, -1.0, 0.0, 0.0]))
    assert torch.equal(of("opo"), torch.tensor([0.75, -0.25, 0.0, 0.0]))
    assert torch.equal(of("gpg"), torch.tensor([1.0, -1.0, 0.0, 0.0]))
    assert of("reinforce_pp").lengths.tolist() == [1, 3, 2, 2]
    assert of("reinforce_pp_baseline").shape == of("gdpo").shape == (4,)
