"""Policy losses and their gradients against the papers' formulas, written anew in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.algorithms import LOSSES
from hybridflow.algorithms.losses import Sequences, TokenInputs
from hybridflow.ragged import RUN

LOW, HIGH, C, TAU = 0.2, 0.3, 1.7, (1.0, 2.5)
Rows = list[tuple[Tensor, Tensor, float]]


def bounded(ratio: Tensor) -> Tensor:
    return torch.clamp(ratio, 1 - LOW, 1 + HIGH)


def clip_objective(ratio: Tensor, advantage: float) -> Tensor:
    return torch.minimum(ratio * advantage, bounded(ratio) * advantage)


def dual(logp: Tensor, old: Tensor, advantage: float) -> Tensor:
    objective = clip_objective((logp - old).exp(), advantage)
    if advantage >= 0:
        return -objective
    return -torch.maximum(objective, torch.full_like(objective, C * advantage))


def gspo(logp: Tensor, old: Tensor, advantage: float) -> Tensor:
    ratio = (logp.sum().exp() / old.sum().exp()) ** (1 / len(logp))
    return -clip_objective(ratio, advantage).expand(len(logp))


def gspo_token(logp: Tensor, old: Tensor, advantage: float) -> Tensor:
    ratio = ((logp.sum().exp() / old.sum().exp()) ** (1 / len(logp))).detach()
    return -clip_objective(ratio * logp.exp() / logp.exp().detach(), advantage)


def gmpo(logp: Tensor, old: Tensor, advantage: float) -> Tensor:
    ratio = (logp - old).exp()
    kept = torch.clamp(ratio, math.exp(-LOW), math.exp(HIGH))
    smaller = torch.minimum(ratio * abs(advantage), kept * abs(advantage))
    larger = torch.maximum(ratio * abs(advantage), kept * abs(advantage))
    chosen = smaller if advantage > 0 else larger
    mean = chosen.log().mean().exp()
    return -(math.copysign(1, advantage) * mean).expand(len(logp))


def cispo(logp: Tensor, old: Tensor, advantage: float) -> Tensor:
    return -bounded((logp - old).exp()).detach() * advantage * logp


def sapo(logp: Tensor, old: Tensor, advantage: float) -> Tensor:
    tau = TAU[0] if advantage > 0 else TAU[1]
    ratio = (logp - old).exp()
    return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage


def reinforce(logp: Tensor, old: Tensor, advantage: float) -> Tensor:
    return -advantage * logp


FORMULAS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "dual_clip": dual,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": reinforce,
    "reinforce": reinforce,
}


def run(name: str, rows: Rows) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss and gradient of the sum, per token, of the package's loss in float64."""
    lengths_S = torch.tensor([len(logp) for logp, _, _ in rows])
    logp_T = torch.cat([logp for logp, _, _ in rows]).requires_grad_()
    advantages_S = torch.tensor([advantage for _, _, advantage in rows], dtype=torch.float64)
    result = LOSSES[name](
        TokenInputs(
            logp_T,
            torch.cat([old for _, old, _ in rows]),
            advantages_S.repeat_interleave(lengths_S),
            *(LOW, HIGH, C, *TAU),
            Sequences(torch.arange(len(rows)).repeat_interleave(lengths_S), lengths_S),
        )
    )
    (gradient_T,) = torch.autograd.grad(result.loss_T.sum(), logp_T)
    return result.loss_T.detach(), gradient_T, result.sums


def expected(name: str, rows: Rows) -> tuple[Tensor, Tensor]:
    losses, gradients = [], []
    for logp, old, advantage in rows:
        leaf = logp.clone().requires_grad_()
        loss = FORMULAS[name](leaf, old, advantage)
        gradients.extend(torch.autograd.grad(loss.sum(), leaf))
        losses.append(loss.detach())
    return torch.cat(losses), torch.cat(gradients)


def assert_as_in_the_paper(name: str, rows: Rows) -> None:
    loss_T, gradient_T, _ = run(name, rows)
    wanted_T, wanted_gradient_T = expected(name, rows)
    torch.testing.assert_close(loss_T, wanted_T, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(gradient_T, wanted_gradient_T, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", FORMULAS)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_losses_are_the_papers(name: str, seed: int, lengths: list[int]):
    generator = torch.Generator().manual_seed(seed)
    rows: Rows = []
    for length in lengths:
        old = -3 * torch.rand(length, dtype=torch.float64, generator=generator)
        moved = torch.randn(length, dtype=torch.float64, generator=generator)
        advantage = torch.randn((), dtype=torch.float64, generator=generator).item()
        rows.append((old + 0.5 * moved, old, advantage))
    assert_as_in_the_paper(name, rows)


def test_every_policy_loss_is_reinforce_while_on_policy():
    """At a ratio of 1 every loss but a supervised one has the policy gradient's gradient."""
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    rows: Rows = [(old.clone(), old, 0.7), (old[:2].clone(), old[:2], -1.2)]
    (_, wanted_T, _) = run("reinforce", rows)
    for name in LOSSES.keys() - {"cross_entropy"}:
        torch.testing.assert_close(run(name, rows)[1], wanted_T, msg=name)


def test_dual_clip_stops_what_ppo_does_not():
    # A ratio of 3 for a bad sample: PPO's loss is 3, its gradient 3; the bound is 1.7.
    logp = torch.tensor([math.log(3.0)], dtype=torch.float64)
    rows: Rows = [(logp, torch.zeros(1, dtype=torch.float64), -1.0)]
    loss_T, gradient_T, sums = run("dual_clip", rows)
    assert loss_T.tolist() == [C] and gradient_T.tolist() == [0.0]
    assert sums["dual_clip_fraction"] == 1
    assert run("ppo_clip", rows)[1].tolist() == pytest.approx([3.0])


def test_sequence_losses_cut_whole_responses():
    # Ratios 4 and 1 have a geometric mean of 2: both tokens lose their gradient.
    old = torch.zeros(2, dtype=torch.float64)
    rows: Rows = [(torch.tensor([4.0, 1.0], dtype=torch.float64).log(), old, 1.0)]
    for name in ("gspo", "gspo_token"):
        loss_T, gradient_T, sums = run(name, rows)
        assert loss_T.tolist() == pytest.approx([-1 - HIGH] * 2)
        assert gradient_T.tolist() == [0.0, 0.0]
        assert sums["clip_fraction"] == sums["clip_fraction_high"] == 2
        assert sums["clip_fraction_low"] == 0
        assert sums["ratio_mean"] == pytest.approx(4.0)
    # GMPO bounds the one token alone: e^0.3, then the root of it; the other keeps its gradient.
    loss_T, gradient_T, _ = run("gmpo", rows)
    assert loss_T.tolist() == pytest.approx([-math.exp(HIGH / 2)] * 2)
    assert gradient_T[0] == 0 and gradient_T[1] == pytest.approx(-math.exp(HIGH / 2))


def test_advantages_per_token_for_gspo_token():
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    sequences = Sequences(torch.tensor([0, 0]), torch.tensor([2]))
    inputs = TokenInputs(logp, logp.detach(), torch.tensor([1.0, -2.0]), sequences=sequences)
    LOSSES["gspo_token"](inputs).loss_T.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == [-1.0, 2.0]


def test_metrics_are_the_declared_ones():
    old = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    for name, loss in LOSSES.items():
        assert set(run(name, [(old.clone(), old, 1.0)])[2]) == set(loss.metrics), name


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_many_tokens_are_worked_on_in_runs_of_the_same_result(name: str):
    """Over more tokens than a run has, loss, gradient and sums are those of the two halves."""
    lengths_S = torch.tensor([RUN - 5, 3, RUN, 9])
    torch.manual_seed(3)
    old_T = -3 * torch.rand(int(lengths_S.sum()))
    logp_T = old_T + 0.5 * torch.randn_like(old_T)
    advantages_T = torch.randn(4).repeat_interleave(lengths_S)

    def part(rows: slice) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        start, stop = (int(lengths_S[:n].sum()) for n in (rows.start, rows.stop))
        leaf_T = logp_T[start:stop].clone().requires_grad_()
        sizes_S = lengths_S[rows]
        inputs = TokenInputs(
            leaf_T,
            old_T[start:stop],
            advantages_T[start:stop],
            sequences=Sequences(torch.repeat_interleave(sizes_S), sizes_S),
        )
        result = LOSSES[name](inputs)
        result.loss_T.sum().backward()
        assert leaf_T.grad is not None
        return result.loss_T.detach(), leaf_T.grad, result.sums

    whole, first, second = part(slice(0, 4)), part(slice(0, 2)), part(slice(2, 4))
    for all_T, *halves in zip(whole[:2], first[:2], second[:2], strict=True):
        torch.testing.assert_close(all_T, torch.cat(halves))
    for metric, total in whole[2].items():
        torch.testing.assert_close(total, first[2][metric] + second[2][metric], rtol=1e-4, atol=1)


@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0])
@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"cross_entropy"}))
def test_a_token_that_has_run_away_leaves_numbers(name: str, gap: float, advantage: float):
    """A ratio beyond float32's range: bounded losses have no gradient, none has NaN."""
    old_T = torch.tensor([-1.0 - max(gap, 0.0), -1.0])
    leaf_T = torch.tensor([-1.0 + min(gap, 0.0), -1.0], requires_grad=True)
    sequences = Sequences(torch.tensor([0, 0]), torch.tensor([2]))
    inputs = TokenInputs(leaf_T, old_T, torch.full((2,), advantage), sequences=sequences)
    result = LOSSES[name](inputs)
    result.loss_T.sum().backward()
    assert leaf_T.grad is not None
    values = [result.loss_T.detach(), leaf_T.grad, *result.sums.values()]
    assert all(bool(value.isfinite().all()) for value in values)
    bounded = {"dual_clip", "sapo"} | (
        {"ppo_clip", "gspo", "gspo_token"} if advantage > 0 else set()
    )
    if gap > 0 and name in bounded:
        assert leaf_T.grad[0] == 0
