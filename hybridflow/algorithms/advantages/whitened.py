"""Advantages that are brought to mean 0 and variance 1 over the whole batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.group import group_relative, has_spread, require_groups
from hybridflow.algorithms.advantages.returns import at_last_tokens, discounted_sums
from hybridflow.algorithms.kl import kl_divergence
from hybridflow.batch import Ragged

_VARIANCE_EPS = 1e-8


def whiten(values_N: Tensor, counts_N: Tensor | None = None, *, shift_mean: bool = True) -> Tensor:
    """``[N]`` values of mean 0 and (unbiased) variance 1; zeros where all are equal.

    float64 stays float64, so that values that differ by little keep their difference; all else
    becomes float32.

    Args:
        counts_N: ``[N]`` how often each value counts, such as a response's tokens; None: once.
        shift_mean: whether the mean becomes 0; else it stays what it was, also where all values
            are equal.
    """
    dtype = values_N.dtype if values_N.dtype == torch.float64 else torch.float32
    whitened_N = values_N.to(torch.float64, copy=True)
    return whiten_(whitened_N, counts_N, shift_mean=shift_mean).to(dtype)


def whiten_(values_N: Tensor, counts_N: Tensor | None = None, *, shift_mean: bool = True) -> Tensor:
    """``whiten`` of float64 values in their place."""
    assert values_N.dtype == torch.float64
    counted_N = values_N if counts_N is None else values_N[counts_N > 0]
    total = len(values_N) if counts_N is None else int(counts_N.sum())
    if total < 2 or bool(counted_N.amin() == counted_N.amax()):  # NaN equals nothing
        return values_N.zero_() if shift_mean else values_N
    weighted_N = values_N if counts_N is None else values_N * counts_N
    mean = weighted_N.sum() / total
    values_N.sub_(mean)
    weighted_N = values_N if counts_N is None else values_N * counts_N
    variance = torch.dot(weighted_N, values_N) / (total - 1)
    values_N.mul_(torch.rsqrt(variance + _VARIANCE_EPS))
    return values_N if shift_mean else values_N.add_(mean)


def reinforce_pp(
    rewards_S: Tensor,
    responses: Ragged,
    gamma: float = 1.0,
    kl_coef: float = 0.0,
    estimator: str = "k1",
    logprobs: Ragged | None = None,
    ref_logprobs: Ragged | None = None,
) -> Ragged:
    """Returns of every token, whitened over all tokens of the batch: REINFORCE++.

    Hu et al., 2025 (arXiv:2501.03262), REINFORCE++ (global advantage normalisation)::

        r_t = [t is the last token] * r - kl_coef * KL_t,  KL_t = logp_t - ref_logp_t (k1)
        R_t = sum over k >= t of gamma^(k - t) r_k
        A_t = (R_t - mean R) / std R,  over every response token of the batch

    Args:
        rewards_S: ``[S]`` outcome rewards.
        responses: whose row lengths count; S rows.
        estimator: of the KL; the paper's is k1.
        logprobs, ref_logprobs: in nats, needed when ``kl_coef`` is not 0.

    Returns:
        One float32 advantage per response token.
    """
    if kl_coef and (logprobs is None or ref_logprobs is None):
        raise ValueError(
            "kl_coef needs the log-probabilities of the policy and of the reference; give "
            "both to the function, or set kl_coef to 0"
        )
    returns_T = torch.empty(len(responses.values), dtype=torch.float64)
    for run, span in responses.runs():
        rewards_t = at_last_tokens(rewards_S[run], responses[run])
        if kl_coef and logprobs is not None and ref_logprobs is not None:
            pair = logprobs.values[span].double(), ref_logprobs.values[span].double()
            rewards_t.sub_(kl_divergence(*pair, estimator).mul_(kl_coef))
        returns_T[span] = discounted_sums(rewards_t, responses[run], gamma)
    return responses.with_values(whiten_(returns_T).float())


def reinforce_pp_baseline(rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
    """Rewards minus their group's mean, whitened over all tokens: REINFORCE++ with baseline.

    Hu et al., 2025 (arXiv:2501.03262), REINFORCE++ w/ baseline::

        a[p, g] = r[p, g] - mean_h r[p, h]
        A[p, g] = (a[p, g] - mean a) / std a,  over the batch, each sample counted once per token

    Args:
        rewards_PG: ``[P, G]`` rewards, G at least 2.
        lengths_PG: ``[P, G]`` response lengths in tokens.

    Returns:
        ``[P, G]`` float32 advantages.
    """
    require_groups(rewards_PG)
    centred_PG = group_relative(rewards_PG, normalize_by_std=False)
    return whiten(centred_PG.flatten(), lengths_PG.flatten()).view_as(centred_PG)


def decoupled_rewards(
    rewards_KPG: Sequence[Tensor], weights: Sequence[float] | None = None, eps: float = 1e-6
) -> Tensor:
    """Several rewards, each normalised within its group, summed, then over the batch: GDPO.

    GDPO (2026, arXiv:2601.05242), decoupled group normalisation::

        a_k[p, g] = (r_k[p, g] - mean_h r_k[p, h]) / (std_h r_k[p, h] + eps)
        a[p, g]   = sum_k w_k a_k[p, g]
        A[p, g]   = (a[p, g] - mean a) / (std a + eps),  over all samples of the batch

    Args:
        rewards_KPG: K tensors ``[P, G]``, G at least 2.
        weights: one per reward; None: all 1.

    Returns:
        ``[P, G]`` float32 advantages; exact zeros when no reward differs within a group.
    """
    weights = [1.0] * len(rewards_KPG) if weights is None else weights
    if len(weights) != len(rewards_KPG):
        raise ValueError(
            f"weights has {len(weights)} entries for {len(rewards_KPG)} rewards; give one each"
        )
    for rewards_PG in rewards_KPG:
        require_groups(rewards_PG)
    terms = zip(rewards_KPG, weights, strict=True)
    summed_PG = torch.stack([w * group_relative(r, eps=eps) for r, w in terms]).sum(dim=0)
    if not has_spread(summed_PG.reshape(1, -1)).any():
        return torch.zeros_like(summed_PG)
    return (summed_PG - summed_PG.mean()) / (summed_PG.std() + eps)
