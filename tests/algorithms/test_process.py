"""PRIME: advantages from implicit process rewards, and the loss of the model that gives them."""

import math

import pytest
import torch

from hybridflow.algorithms import FUNCTIONS, PREFERENCES, FunctionContext
from hybridflow.algorithms.advantages import implicit_process
from hybridflow.algorithms.advantages.returns import discounted_sums
from hybridflow.algorithms.losses.preference import PreferenceSettings, Responses
from hybridflow.batch import Batch, Ragged
from hybridflow.recipe.axes import Axis


def test_process_advantages_by_hand():
    """Two samples; beta 0.5 makes token rewards of [2, 4] and [1]: means 3 and 1."""
    ref = Ragged.from_rows([[-1.0, -2.0], [-3.0]])
    prm = ref.with_values(ref.values + torch.tensor([4.0, 8.0, 2.0]))
    rewards_PG = torch.tensor([[1.0, 0.0]])
    plain = implicit_process(rewards_PG, prm, ref, beta=0.5)
    # Sample 0: (2 - 1) + (4 - 1) + 1 and (4 - 1) + 1; sample 1: (1 - 3) - 1.
    assert plain.values.tolist() == [5.0, 4.0, -3.0]
    halved = implicit_process(rewards_PG, prm, ref, beta=0.5, gamma=0.5)
    assert halved.values.tolist() == [1 + 0.5 * 3 + 1, 4.0, -3.0]


def test_process_advantages_equal_loops_in_float64():
    generator = torch.Generator().manual_seed(2)
    lengths, group, beta, gamma = [3, 70, 1, 130, 64, 5], 3, 0.2, 0.97
    ref = Ragged.from_rows([torch.randn(n, generator=generator) for n in lengths])
    prm = ref.with_values(ref.values + torch.randn(len(ref.values), generator=generator))
    rewards = torch.rand(6, generator=generator)
    given = implicit_process(rewards.view(2, 3), prm, ref, beta, gamma)
    rows = [
        [beta * (p - q) for p, q in zip(a.tolist(), b.tolist(), strict=True)]
        for a, b in zip(prm.rows(), ref.rows(), strict=True)
    ]
    means = [sum(row) / len(row) for row in rows]
    expected: list[float] = []
    for sample, row in enumerate(rows):
        first = sample // group * group
        others = [j for j in range(first, first + group) if j != sample]
        baseline = sum(means[j] for j in others) / 2
        outcome = rewards[sample].item() - sum(rewards[j].item() for j in others) / 2
        for t in range(len(row)):
            sums = sum(gamma ** (s - t) * (row[s] - baseline) for s in range(t, len(row)))
            expected.append(sums + outcome)
    torch.testing.assert_close(given.values, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("lengths", [[], [0], [1, 0, 64], [65, 128, 3], [4500, 2]])
def test_discounted_sums_equal_a_loop(lengths: list[int], discount: float):
    generator = torch.Generator().manual_seed(1)
    values_T = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    rows = Ragged.from_rows([[0.0] * n for n in lengths], dtype=torch.float64)
    expected: list[float] = []
    for row in rows.with_values(values_T).rows():
        total, sums = 0.0, []
        for value in reversed(row.tolist()):
            total = value + discount * total
            sums.append(total)
        expected.extend(reversed(sums))
    given_T = discounted_sums(values_T, rows, discount)
    torch.testing.assert_close(given_T, torch.tensor(expected, dtype=torch.float64))


def test_the_function_of_the_graph():
    responses = Ragged.from_rows([[0, 0], [0]])
    prm, ref = (responses.with_values(torch.tensor(v)) for v in ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]))
    batch = Batch(
        {"rewards": torch.tensor([1.0, 0.0]), "prm_logprobs": prm, "ref_logprobs": ref},
        {"rewards": Axis.SAMPLES, "prm_logprobs": Axis.TOKENS, "ref_logprobs": Axis.TOKENS},
        prompts=1,
        samples_per_prompt=2,
    )
    context = FunctionContext(preference_beta=0.5)
    given = FUNCTIONS["prime"](batch, context, gamma=0.9)["advantages"]
    assert given.equals(implicit_process(torch.tensor([[1.0, 0.0]]), prm, ref, 0.5, 0.9))


def test_outcomes_become_labels():
    batch = Batch({"rewards": torch.tensor([0.0, 0.5, 1.0])}, {"rewards": Axis.SAMPLES}, 3)
    labels = FUNCTIONS["outcome_labels"](batch, FunctionContext())["labels"]
    assert labels.tolist() == [False, False, True]
    told = FUNCTIONS["outcome_labels"](batch, FunctionContext(), above=0.2)["labels"]
    assert told.tolist() == [False, True, True]


def test_the_loss_by_hand():
    """Rewards of beta times 2 and 6 at beta 0.5; the second outcome is bad."""
    logprobs_S = torch.tensor([-1.0, -2.0], requires_grad=True)
    responses = Responses(
        logprobs_S,
        torch.tensor([3, 4]),
        ref_logprobs_S=torch.tensor([-3.0, -8.0]),
        labels_S=torch.tensor([True, False]),
    )
    found = PREFERENCES["prime"](responses, PreferenceSettings(beta=0.5))
    expected = [math.log(1 + math.exp(-1.0)), math.log(1 + math.exp(3.0))]
    assert found.loss_N.tolist() == pytest.approx(expected)
    found.loss_N.sum().backward()
    slopes = [-0.5 / (1 + math.exp(1.0)), 0.5 / (1 + math.exp(-3.0))]
    assert logprobs_S.grad is not None and logprobs_S.grad.tolist() == pytest.approx(slopes)
    assert found.metrics["outcome_accuracy"].tolist() == [1.0, 0.0]
    assert found.metrics["good_reward"].tolist() == [1.0]
    assert found.metrics["bad_reward"].tolist() == [3.0]
