"""Advantages and rewards against values worked by hand."""

import json
from pathlib import Path

import pytest
import torch

from hybridflow.algorithms import FUNCTIONS, FunctionContext
from hybridflow.algorithms.advantages import group_relative
from hybridflow.algorithms.rewards_math import shuffle, signal_prompts, soft_overlong, weighted_sum
from hybridflow.batch import Batch, Ragged
from hybridflow.recipe.axes import Axis


def test_group_relative_by_hand():
    # Row 0: mean 0.5, deviations +-0.5, sample std sqrt(4 * 0.25 / 3) = 1 / sqrt(3).
    # Row 1: mean 2, deviations -2 0 0 2, sample std sqrt(8 / 3).
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 2.0, 2.0, 4.0], [0.7, 0.7, 0.7, 0.7]])
    half, two = 0.5 * 3**0.5, 2 / (8 / 3) ** 0.5
    expected = torch.tensor([[half, -half, -half, half], [-two, 0, 0, two], [0.0, 0, 0, 0]])
    torch.testing.assert_close(group_relative(rewards_PG), expected, rtol=1e-5, atol=1e-5)


def test_group_relative_without_std_only_centres():
    rewards_PG = torch.tensor([[1.0, 0.0, 0.5], [3.0, 3.0, 3.0]])
    expected = torch.tensor([[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(group_relative(rewards_PG, normalize_by_std=False), expected)


def test_a_group_without_spread_is_exactly_zero():
    # The float mean of seven 0.1 is not 0.1; dividing that rounding by eps must not show.
    assert not group_relative(torch.full((3, 7), 0.1)).any()


def test_one_sample_per_prompt_has_no_signal():
    assert not group_relative(torch.tensor([[1.0], [0.0]])).any()


def test_nan_rewards_stay_visible():
    assert group_relative(torch.tensor([[float("nan"), 1.0]])).isnan().all()


def test_group_relative_wants_groups():
    with pytest.raises(ValueError, match="prompts, samples"):
        group_relative(torch.zeros(4))


def test_weighted_sum():
    total = weighted_sum([torch.tensor([1, 0]), torch.tensor([0.5, 2.0])], [2.0, -1.0])
    torch.testing.assert_close(total, torch.tensor([1.5, -2.0]))
    with pytest.raises(ValueError, match="1 entries for 2"):
        weighted_sum([torch.zeros(1), torch.zeros(1)], [1.0])


def test_shuffle_is_a_seeded_permutation():
    values_S = torch.arange(50.0)
    first = shuffle(values_S, seed=1, step=0)
    assert torch.equal(first.sort().values, values_S) and not torch.equal(first, values_S)
    assert torch.equal(first, shuffle(values_S, seed=1, step=0))
    assert not torch.equal(first, shuffle(values_S, seed=1, step=1))
    assert not torch.equal(first, shuffle(values_S, seed=2, step=0))


def test_signal_prompts_stop_at_the_wanted_number():
    rewards_PG = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.5]])
    assert signal_prompts(rewards_PG, held=0, wanted=9) == [0, 2, 4]
    assert signal_prompts(rewards_PG, held=7, wanted=9) == [0, 2]
    assert signal_prompts(rewards_PG, held=9, wanted=9) == []


def round_of(first_id: int, rewards: list[list[float]]) -> Batch:
    prompts, samples = len(rewards), len(rewards[0])
    ids = Ragged.from_rows([[first_id + p] * (p + 1) for p in range(prompts)])
    responses = Ragged.from_rows([[first_id, s] for s in range(prompts * samples)])
    fields = {
        "prompts": ids,
        "responses": responses,
        "rollout_logprobs": responses.with_values(-responses.values.float()),
        "rewards": torch.tensor(rewards).flatten(),
    }
    axes = dict(zip(fields, [Axis.PROMPTS, Axis.TOKENS, Axis.TOKENS, Axis.SAMPLES], strict=True))
    return Batch(fields, axes, prompts, samples)


def test_accumulate_signal_over_two_rounds():
    accumulate = FUNCTIONS["accumulate_signal"]
    first = accumulate(
        round_of(10, [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), FunctionContext(prompts_per_step=2)
    )
    assert not first["enough"] and len(first["kept_prompts"]) == 1
    second = accumulate(
        round_of(20, [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0]]),
        FunctionContext(prompts_per_step=2, previous=first),
    )
    assert second["enough"]
    assert [row.tolist() for row in second["kept_prompts"]] == [[10], [21, 21]]
    assert second["kept_rewards"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert [row.tolist() for row in second["kept_responses"]] == [
        [10, 0],
        [10, 1],
        [20, 2],
        [20, 3],
    ]


def test_accumulated_rounds_keep_what_they_are_given():
    """Whether a response ended, and its tokens' versions, stay with it."""
    accumulate = FUNCTIONS["accumulate_signal"]
    batch = round_of(10, [[1.0, 1.0], [1.0, 0.0]])
    finished = torch.tensor([True, True, False, True])
    versions = batch["responses"].with_values(torch.arange(8))
    batch = batch.with_field("finished", Axis.SAMPLES, finished)
    batch = batch.with_field("token_versions", Axis.TOKENS, versions)
    first = accumulate(batch, FunctionContext(prompts_per_step=2))
    second = accumulate(batch, FunctionContext(prompts_per_step=2, previous=first))
    assert second["kept_finished"].tolist() == [False, True] * 2
    assert second["kept_token_versions"].values.tolist() == [4, 5, 6, 7] * 2
    assert "kept_finished" not in accumulate(round_of(0, [[1.0, 0.0]]), FunctionContext())


def test_soft_overlong_by_hand():
    """Equation 13 for at most 10 tokens, with a buffer of 4."""
    lengths_S = torch.tensor([1, 6, 7, 8, 10, 12])
    expected = [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert soft_overlong(lengths_S, longest=10, buffer=4).tolist() == expected
    halved = soft_overlong(lengths_S, longest=10, buffer=4, factor=0.5)
    assert halved.tolist() == [value / 2 for value in expected]
    for buffer in (0, 11):
        with pytest.raises(ValueError, match=f"buffer of {buffer} tokens must be at least 1"):
            soft_overlong(lengths_S, longest=10, buffer=buffer)


def test_soft_overlong_is_trls():
    figures = json.loads((Path(__file__).parent / "trl_figures.json").read_text())["soft_overlong"]
    lengths_S = torch.tensor(figures["lengths"])
    given_S = soft_overlong(lengths_S, figures["longest"], figures["buffer"])
    assert given_S.tolist() == pytest.approx(figures["values"])


def test_the_buffer_is_a_fifth_unless_told():
    responses = Ragged.from_rows([[0] * 16, [0] * 18, [0] * 20])
    batch = Batch(
        {"rewards": torch.ones(3), "responses": responses},
        {"rewards": Axis.SAMPLES, "responses": Axis.TOKENS},
        prompts=3,
    )
    shaped = FUNCTIONS["soft_overlong"](batch, FunctionContext(max_tokens=20))["shaped"]
    assert shaped.tolist() == [1.0, 0.5, 0.0]


def test_group_relative_of_a_batch():
    batch = round_of(0, [[1.0, 0.0], [2.0, 2.0]]).select(["rewards"])
    centred = FUNCTIONS["group_relative"](batch, FunctionContext(normalize_by_std=False))
    assert centred["advantages"].tolist() == [0.5, -0.5, 0.0, 0.0]
