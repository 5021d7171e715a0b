"""Advantages from a critic: token rewards, then generalised advantage estimation."""

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.returns import at_last_tokens, discounted_sums
from hybridflow.algorithms.advantages.whitened import whiten, whiten_
from hybridflow.algorithms.kl import kl_divergence
from hybridflow.batch import Ragged


def token_rewards(
    rewards_S: Tensor | None,
    responses: Ragged,
    kl_coef: float = 0.0,
    estimator: str = "k1",
    logprobs: Ragged | None = None,
    ref_logprobs: Ragged | None = None,
    *,
    scores: Ragged | None = None,
    whitened: bool = False,
) -> Ragged:
    """Scores of tokens and the outcome at the last one, less a penalty for leaving the reference.

    Ziegler et al., 2019 (arXiv:1909.08593), section 2, per token as in InstructGPT (Ouyang et al.,
    2022, arXiv:2203.02155)::

        r_t = s_t + [t is the last token] * r - kl_coef * KL_t,
        KL_t of one of the estimators of ``kl``

    Args:
        rewards_S: ``[S]`` outcome rewards; None: 0.
        responses: whose row lengths count; S rows.
        estimator: ``k1``, ``k2``, ``k3`` or ``abs`` of ``logprobs - ref_logprobs``.
        logprobs, ref_logprobs: in nats; needed when ``kl_coef`` is not 0.
        scores: of every token, as a process reward gives them; None: 0.
        whitened: divide by the standard deviation over all tokens of the batch; the mean stays.

    Returns:
        One float32 reward per response token.

    Example: reward 1 of a response with KL ``[0.1, 0.2, 0.3]`` at ``kl_coef`` 0.5 gives
    ``[-0.05, -0.1, 0.85]``.
    """
    rewards_T = torch.zeros(len(responses.values), dtype=torch.float64)
    if rewards_S is not None:
        rewards_T = at_last_tokens(rewards_S, responses)
    if scores is not None:
        assert torch.equal(scores.offsets, responses.offsets), "scores of other responses"
        rewards_T += scores.values
    if kl_coef:
        if logprobs is None or ref_logprobs is None:
            raise ValueError(
                "the KL in the reward needs the log-probabilities of the policy and of the "
                "reference; give both to the function, or set algorithm.kl.coef to 0"
            )
        kl_T = kl_divergence(logprobs.values.double(), ref_logprobs.values.double(), estimator)
        rewards_T = rewards_T - kl_coef * kl_T
    if whitened:
        rewards_T = whiten(rewards_T, shift_mean=False)
    return responses.with_values(rewards_T.float())


def gae(
    rewards: Ragged, values: Ragged, gamma: float = 1.0, lam: float = 0.95, *, whitened: bool = True
) -> tuple[Ragged, Ragged]:
    """Generalised advantage estimation over every response, and the critic's targets.

    Schulman et al., 2016 (arXiv:1506.02438), equations 11, 12 and 16::

        delta_t = r_t + gamma * V_(t+1) - V_t,  V after the last token being 0
        A_t     = sum over k >= 0 of (gamma * lam)^k * delta_(t+k)
        R_t     = A_t + V_t

    Args:
        rewards: of every response token.
        values: of the state before every response token.
        gamma: discount per token.
        lam: between 0 (the critic alone: least variance) and 1 (the rewards alone: no bias).
        whitened: bring advantages to mean 0 and variance 1 over all tokens; returns stay.

    Returns:
        Advantages and returns, float32, one of each per response token.

    Example: rewards ``[0, 1]`` with values ``[0.5, 0.25]`` at gamma 1, lam 0.5: deltas are
    ``[-0.25, 0.75]``, advantages ``[0.125, 0.75]``, returns ``[0.625, 1]``.
    """
    assert torch.equal(rewards.offsets, values.offsets), "rewards and values of other responses"
    advantages_T = torch.empty(len(values.values), dtype=torch.float64)
    returns_T = torch.empty(len(values.values))
    for run, span in values.runs():
        values_t = values.values[span].double()
        deltas_t = _deltas(rewards.values[span], values_t, values[run], gamma)
        advantages_T[span] = discounted_sums(deltas_t, values[run], gamma * lam)
        returns_T[span] = advantages_T[span] + values_t
    if whitened:
        whiten_(advantages_T)
    return rewards.with_values(advantages_T.float()), rewards.with_values(returns_T)


def _deltas(rewards_T: Tensor, values_T: Tensor, rows: Ragged, gamma: float) -> Tensor:
    """``[T]`` float64 ``r + gamma * (the next token's value) - V``."""
    deltas_T = rewards_T.double() - values_T
    next_T = values_T[1:] * gamma
    ends_S = rows.offsets[1:][rows.lengths > 0] - 1
    next_T[ends_S[:-1]] = 0.0
    deltas_T[:-1] += next_T
    return deltas_T
