"""Agreement against sums by hand; the worst token is named."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.agreement import Disagreement, check, compare
from hybridflow.batch import Ragged

ROLLOUT = Ragged.from_rows([[-1.0, -2.0], [], [-0.5, -3.0, -1.0]])
TRAINER = ROLLOUT.with_values(ROLLOUT.values + torch.tensor([0.0, 0.1, -0.3, 0.0, 0.02]))


def test_by_hand():
    found = compare(ROLLOUT, TRAINER, threshold=0.05)
    assert (found.tokens, found.share) == (5, pytest.approx(2 / 5))
    assert found.mean == pytest.approx(0.42 / 5) and found.max == pytest.approx(0.3)
    # KL(rollout || trainer), d = rollout - trainer: exp(-d) - 1 + d
    differences = [-0.1, 0.3, -0.02]
    assert found.kl == pytest.approx(sum(math.exp(-d) - 1 + d for d in differences) / 5, rel=1e-4)
    assert found.worst is not None and (found.worst.sample, found.worst.token) == (2, 0)


def test_the_kl_estimate_is_that_of_the_rollout_to_the_trainer():
    """Over the whole vocabulary, weighted by the rollout's probabilities, k3 is the KL itself."""
    generator = torch.Generator().manual_seed(0)
    rollout, trainer = torch.randn(2, 50, generator=generator).double().log_softmax(-1)
    tokens = torch.multinomial(rollout.exp(), 200_000, replacement=True, generator=generator)
    found = compare(
        Ragged.from_rows([rollout[tokens]]), Ragged.from_rows([trainer[tokens]]), threshold=0.01
    )
    exact = (rollout.exp() * (rollout - trainer)).sum().item()
    other = (trainer.exp() * (trainer - rollout)).sum().item()
    assert abs(found.kl - exact) < 0.02 < abs(exact - other)


def test_tokens_that_are_left_out_do_not_count():
    compared = torch.tensor([True, True, False, True, False])
    found = compare(ROLLOUT, TRAINER, 0.05, compared)
    assert found.tokens == 3 and found.max == pytest.approx(0.1)
    assert found.worst is not None and (found.worst.sample, found.worst.token) == (0, 1)
    nothing = compare(ROLLOUT, TRAINER, 0.05, torch.zeros(5, dtype=torch.bool))
    assert (nothing.tokens, nothing.mean, nothing.max, nothing.worst) == (0, 0.0, 0.0, None)
    check(nothing.worst, 0.0)


def test_the_bound_names_sample_and_token():
    worst = compare(ROLLOUT, TRAINER, 0.05).worst
    check(worst, 0.31)
    with pytest.raises(
        Disagreement, match=r"sample 2, token 0 .* -0\.5, .* -0\.8; .*bound 0\.0001"
    ):
        check(worst, 1e-4)


@given(st.integers(0, 4), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_no_number_is_over_every_bound(place: int, value: float):
    values = TRAINER.values.clone()
    values[place] = value
    worst = compare(ROLLOUT, ROLLOUT.with_values(values), 0.05).worst
    with pytest.raises(Disagreement, match="differ by inf"):
        check(worst, 1e30)
