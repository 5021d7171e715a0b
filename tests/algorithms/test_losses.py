"""Losses, KL estimators and aggregation against independent float64 formulas."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms import AGGREGATIONS, ESTIMATORS, LOSSES
from hybridflow.algorithms.aggregation import token_weights, weighted_sum
from hybridflow.algorithms.kl import kl_divergence
from hybridflow.algorithms.losses import TokenInputs


def clipped(logp: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(logp - old)
    bounded = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, bounded * advantage)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-2, 2)), min_size=1, max_size=9
    ),
    st.floats(0.05, 0.5),
    st.floats(0.05, 0.9),
)
def test_ppo_clip(tokens, low, high):
    logp, old, advantages = torch.tensor(tokens, dtype=torch.float64).T
    inputs = TokenInputs(logp.float(), old.float(), advantages.float(), low, high)
    expected = torch.tensor([clipped(*token, low, high) for token in tokens])
    torch.testing.assert_close(LOSSES["ppo_clip"](inputs).loss_T, expected, rtol=1e-4, atol=1e-5)


def test_ppo_clip_stops_the_gradient_of_a_clipped_token():
    # Ratios 2 and 0.5 with the advantage pushing further out, then back in.
    logp = torch.tensor([math.log(2), math.log(0.5), math.log(2), math.log(0.5)])
    logp.requires_grad_()
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    result = LOSSES["ppo_clip"](TokenInputs(logp, torch.zeros(4), advantages, 0.2, 0.3))
    result.loss_T.sum().backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, torch.tensor([0.0, 0.0, 2.0, -0.5]))
    torch.testing.assert_close(result.loss_T, torch.tensor([-1.3, 0.8, 2.0, -0.5]))
    assert result.sums["clip_fraction"] == 2
    assert result.sums["clip_fraction_low"] == 1 and result.sums["clip_fraction_high"] == 1


def test_cross_entropy():
    result = LOSSES["cross_entropy"](TokenInputs(torch.tensor([-0.5, -2.0]), torch.zeros(2), None))
    assert result.loss_T.tolist() == [0.5, 2.0]


def test_kl_by_hand():
    logp, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])  # d = 0.5, -1
    expected = {
        "k1": [0.5, -1.0],
        "k2": [0.125, 0.5],
        "k3": [math.exp(-0.5) - 0.5, math.e - 2],
        "abs": [0.5, 1.0],
    }
    assert set(expected) == set(ESTIMATORS)
    for name, values in expected.items():
        torch.testing.assert_close(kl_divergence(logp, ref, name), torch.tensor(values))
    with pytest.raises(ValueError, match="did you mean 'k3'"):
        kl_divergence(logp, ref, "kk3")


def test_k1_and_k3_are_unbiased():
    logits = torch.tensor([[0.3, -1.0, 0.8, 0.1], [0.0, 0.5, -0.2, 0.4]], dtype=torch.float64)
    policy, reference = logits.log_softmax(dim=1)
    exact = (policy.exp() * (policy - reference)).sum()
    for name in ("k1", "k3"):
        estimate = (policy.exp() * kl_divergence(policy, reference, name)).sum()
        torch.testing.assert_close(estimate, exact)


def naive(aggregation: str, rows: list[torch.Tensor]) -> torch.Tensor:
    if aggregation == "token_mean":
        return torch.cat(rows).mean()
    inner = [row.mean() if aggregation == "sequence_mean_token_mean" else row.sum() for row in rows]
    return torch.stack(inner).mean()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.data())
def test_aggregation_is_the_same_for_every_split(lengths, data):
    rows = [torch.arange(1.0, n + 1) * (i + 1) for i, n in enumerate(lengths)]
    cut = data.draw(st.integers(0, len(rows)))
    for aggregation in AGGREGATIONS:
        total = norm = 0.0
        for part in (rows[:cut], rows[cut:]):
            sizes = torch.tensor([len(row) for row in part], dtype=torch.int64)
            weights_T, share = token_weights(aggregation, sizes)
            total += float((weights_T * torch.cat([*part, torch.zeros(0)])).sum())
            norm += share
        assert total / norm == pytest.approx(float(naive(aggregation, rows)), rel=1e-5)


def test_which_responses_count():
    """One that has nothing to say counts, one that has lost all its tokens does not."""
    lengths_S = torch.tensor([2, 0, 1])
    kept_T = torch.tensor([False, False, True])
    for aggregation in AGGREGATIONS.keys() - {"token_mean"}:
        assert token_weights(aggregation, lengths_S)[1] == 3, aggregation
        assert token_weights(aggregation, lengths_S, kept_T=kept_T)[1] == 2, aggregation
    assert token_weights("token_mean", lengths_S, kept_T=kept_T)[1] == 1


def test_unknown_aggregation_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'token_mean'"):
        token_weights("tokenmean", torch.tensor([1]))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_one_weight_for_all_is_that_of_a_mask_that_keeps_all(aggregation):
    lengths_S = torch.tensor([3, 0, 2])
    everywhere_T = torch.ones(5, dtype=torch.bool)
    source_R = torch.tensor([4, 0, 2])
    found = []
    for kept_T in (None, everywhere_T):
        weights_T, share = token_weights(aggregation, lengths_S, 7.0, kept_T)
        loss_R = torch.tensor([0.5, -2.0, 3.0], requires_grad=True)
        total = weighted_sum(weights_T, loss_R, source_R)
        total.backward()
        expected = torch.dot(weights_T[source_R], loss_R.detach())
        torch.testing.assert_close(total.detach(), expected)
        torch.testing.assert_close(loss_R.grad, weights_T[source_R])
        found.append((share, total.item()))
    assert found[0] == pytest.approx(found[1])
    whole_T = torch.arange(5.0)
    torch.testing.assert_close(weighted_sum(weights_T, whole_T), torch.dot(weights_T, whole_T))
