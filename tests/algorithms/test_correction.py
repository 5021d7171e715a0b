"""Corrections of the mismatch between trainer and rollout, by hand and in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms.aggregation import token_weights
from hybridflow.algorithms.correction import LEVELS, METHODS, correct, off_policy_masked
from hybridflow.algorithms.losses import Sequences
from hybridflow.batch import Ragged

LENGTHS = [2, 1, 3]
# Ratios trainer / rollout; the responses' products are 2, 4 and 1/64, their geometric means
# sqrt(2), 4 and 1/4.
RATIOS = [4.0, 0.5, 4.0, 0.25, 0.25, 0.25]


def sequences_of(lengths: list[int]) -> Sequences:
    return Sequences.of(Ragged.from_rows([[0] * length for length in lengths], torch.int64))


def corrected(method: str, level: str, low: float = 0.4, high: float = 3.0):
    trainer_T = torch.tensor(RATIOS).log() - 1.5
    return correct(
        trainer_T, torch.full((6,), -1.5), sequences_of(LENGTHS), method, level, low, high
    )


ROOT = math.sqrt(2)
BY_HAND = {
    ("truncated", "token"): ([3, 0.5, 3, 0.25, 0.25, 0.25], "111111", "101000"),
    ("truncated", "sequence"): ([ROOT, ROOT, 3, 0.25, 0.25, 0.25], "111111", "001000"),
    ("truncated", "sequence_sum"): ([2, 2, 3, *[1 / 64] * 3], "111111", "001000"),
    ("masked", "token"): ([0, 0.5, 0, 0, 0, 0], "111111", "101111"),
    ("masked", "sequence"): ([ROOT, ROOT, 0, 0, 0, 0], "111111", "001111"),
    ("masked", "sequence_sum"): ([2, 2, 0, 0, 0, 0], "111111", "001111"),
    ("rejection", "token"): ([0, 1, 0, 0, 0, 0], "010000", "101111"),
    ("rejection", "sequence"): ([1, 1, 0, 0, 0, 0], "110000", "001111"),
    ("rejection", "sequence_sum"): ([1, 1, 0, 0, 0, 0], "110000", "001111"),
}


def flags(text: str) -> torch.Tensor:
    return torch.tensor([letter == "1" for letter in text])


@pytest.mark.parametrize(("method", "level"), BY_HAND)
def test_by_hand(method: str, level: str):
    weights, kept, out = BY_HAND[method, level]
    given = corrected(method, level)
    torch.testing.assert_close(given.weights_T, torch.tensor(weights, dtype=torch.float32))
    assert torch.equal(given.kept_T, flags(kept)) and torch.equal(given.corrected_T, flags(out))


def test_the_worked_values_are_all_there():
    assert set(BY_HAND) == {(method, level) for method in METHODS for level in LEVELS}


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(METHODS), st.sampled_from(LEVELS), st.lists(st.integers(1, 5), min_size=1))
def test_nothing_changes_where_both_agree(method: str, level: str, lengths: list[int]):
    logprobs_T = -torch.rand(sum(lengths))
    given = correct(logprobs_T, logprobs_T, sequences_of(lengths), method, level, 0.5, 2.0)
    assert torch.equal(given.weights_T, torch.ones(sum(lengths)))
    assert given.kept_T.all() and not given.corrected_T.any()


def test_a_token_that_the_rollout_thought_impossible():
    """A ratio without end is over every bound, one that is not a number within none."""
    trainer_T, rollout_T = torch.tensor([-1.0, -math.inf]), torch.tensor([-math.inf, -math.inf])
    sequences = sequences_of([1, 1])
    masked = correct(trainer_T, rollout_T, sequences, "masked", "token", 0.5, 2.0)
    assert masked.weights_T.tolist() == [0, 0] and masked.corrected_T.all()
    truncated = correct(trainer_T, rollout_T, sequences, "truncated", "token", 0.5, 2.0)
    assert truncated.weights_T[0] == 2


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"method 'trunc' is unknown.*truncated"):
        corrected("trunc", "token")
    with pytest.raises(ValueError, match=r"level 'tokens' is unknown.*token"):
        corrected("masked", "tokens")


def test_off_policy_mask_by_hand():
    """Means of rollout - current: 0.5, 0.1, 0.5; the last response has advantages of both signs."""
    rollout_T = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    current_T = torch.tensor([-1.8, -1.2, -1.1, -1.5, -1.5], requires_grad=True)
    advantages_T = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0])
    masked_T = off_policy_masked(
        current_T, rollout_T, advantages_T, sequences_of([2, 1, 2]), bound=0.3
    )
    assert torch.equal(masked_T, flags("11010"))
    tolerant_T = off_policy_masked(
        current_T, rollout_T, advantages_T, sequences_of([2, 1, 2]), bound=0.6
    )
    assert not tolerant_T.any()


MASKED = {
    # 3 tokens of 6 are kept: both of the first response, the last of the third.
    "token_mean": ([1, 1, 0, 0, 0, 1], 3),
    "sequence_mean_token_mean": ([0.5, 0.5, 0, 0, 0, 1], 2),
    "sequence_mean_token_sum": ([1, 1, 0, 0, 0, 1], 2),
    "constant": ([0.125, 0.125, 0, 0, 0, 0.125], 2),
}


@pytest.mark.parametrize("aggregation", MASKED)
def test_means_do_not_count_what_takes_no_part(aggregation: str):
    weights, count = MASKED[aggregation]
    weights_T, normaliser = token_weights(aggregation, torch.tensor(LENGTHS), 8.0, flags("110001"))
    assert weights_T.tolist() == weights and normaliser == count
