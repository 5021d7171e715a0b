"""A sample's reward beside those of the other samples of its prompt."""

import torch
from torch import Tensor


def group_relative(rewards_PG: Tensor, normalize_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Reward of each sample relative to the other samples of its prompt.

    DeepSeekMath (Shao et al., 2024, arXiv:2402.03300), section 4.1.2, outcome supervision::

        A[p, g] = (r[p, g] - mean_g r[p]) / (std_g r[p] + eps)

    ``std`` is the sample standard deviation (n - 1), as in the reference implementations; without
    normalisation (Dr. GRPO, Liu et al., 2025, arXiv:2503.20783) only the mean is subtracted.

    Args:
        rewards_PG: ``[P, G]`` rewards of G samples of each of P prompts.

    Returns:
        ``[P, G]`` float32 advantages. A group whose rewards are all equal carries no signal and
        gets exact zeros (rounding of the mean would else be blown up by the division).

    Example: rewards ``[1, 0, 0, 1]`` give ``[0.866, -0.866, -0.866, 0.866]``.
    """
    if rewards_PG.ndim != 2:
        raise ValueError(f"rewards must be [prompts, samples], got {tuple(rewards_PG.shape)}")
    rewards_PG = rewards_PG.float()
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    if normalize_by_std and rewards_PG.shape[1] > 1:
        centred_PG = centred_PG / (rewards_PG.std(dim=1, keepdim=True) + eps)
    return torch.where(has_spread(rewards_PG)[:, None], centred_PG, 0.0)


def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """Reward of each sample minus the mean of the prompt's other samples: RLOO.

    Ahmadian et al., 2024 (arXiv:2402.14740), the REINFORCE leave-one-out estimator::

        A[p, g] = r[p, g] - 1 / (G - 1) * sum over h != g of r[p, h]
                = G / (G - 1) * (r[p, g] - mean_h r[p, h])

    Args:
        rewards_PG: ``[P, G]`` rewards, G at least 2.

    Returns:
        ``[P, G]`` float32 advantages; exact zeros where a prompt's rewards are all equal.

    Example: rewards ``[1, 0, 0, 1]`` give ``[0.667, -0.667, -0.667, 0.667]``.
    """
    require_groups(rewards_PG)
    samples = rewards_PG.shape[1]
    return _centred(rewards_PG) * (samples / (samples - 1))


def minus_baseline(rewards_PG: Tensor, baseline_P: Tensor) -> Tensor:
    """Reward of each sample minus that of the prompt's greedy response: ReMax.

    Li et al., 2023 (arXiv:2310.10505), equation 7, algorithm 1::

        A[p, g] = r[p, g] - b[p],  b[p] the reward of the likeliest tokens one after the other

    A prompt needs one sample alone: the baseline does not come from the samples.

    Args:
        rewards_PG: ``[P, G]`` rewards.
        baseline_P: ``[P]`` rewards of the greedy responses.

    Returns:
        ``[P, G]`` float32 advantages.

    Example: rewards ``[[1, 0]]`` over a baseline ``[1]`` give ``[[0, -1]]``.
    """
    if baseline_P.shape != rewards_PG.shape[:1]:
        raise ValueError(
            f"baseline must be [{len(rewards_PG)}], one value a prompt, got "
            f"{tuple(baseline_P.shape)}"
        )
    return rewards_PG.float() - baseline_P.float()[:, None]


def optimal_baseline(rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
    """Reward of each sample minus the length-weighted mean of its prompt's: OPO.

    Hao et al., 2025 (arXiv:2505.23585), section 3: the baseline of least gradient variance, with
    the squared norm of a response's score taken to grow with its length ``l``::

        A[p, g] = r[p, g] - sum_h l[p, h] r[p, h] / sum_h l[p, h]

    Args:
        rewards_PG: ``[P, G]`` rewards, G at least 2.
        lengths_PG: ``[P, G]`` response lengths in tokens.

    Returns:
        ``[P, G]`` float32 advantages; exact zeros where a prompt's rewards are all equal.

    Example: rewards ``[1, 0]`` of lengths ``[1, 3]`` give ``[0.75, -0.25]``.
    """
    require_groups(rewards_PG)
    rewards_PG, lengths_PG = rewards_PG.float(), lengths_PG.float()
    tokens_P1 = lengths_PG.sum(dim=1, keepdim=True).clamp(min=1)
    baseline_P1 = (rewards_PG * lengths_PG).sum(dim=1, keepdim=True) / tokens_P1
    return torch.where(has_spread(rewards_PG)[:, None], rewards_PG - baseline_P1, 0.0)


def group_policy_gradient(rewards_PG: Tensor) -> Tensor:
    """Centred rewards, scaled up for the groups that carry no signal: GPG.

    Chu et al., 2025 (arXiv:2504.02546), section 2: with ``F_norm = 1`` (no division by the
    standard deviation)::

        A[p, g] = alpha * (r[p, g] - mean_h r[p, h]),  alpha = B / (B - M)

    for B samples in the batch, of which M are in groups whose rewards are all equal: their
    gradient is zero, but an average over the batch counts them.

    Args:
        rewards_PG: ``[P, G]`` rewards, G at least 2.

    Returns:
        ``[P, G]`` float32 advantages; all zero when no group carries a signal.

    Example: rewards ``[[1, 0], [1, 1]]`` give ``[[1, -1], [0, 0]]``: alpha is 2.
    """
    require_groups(rewards_PG)
    signal = has_spread(rewards_PG).float().mean()
    return _centred(rewards_PG) / signal.clamp(min=1 / len(rewards_PG))


def require_groups(rewards_PG: Tensor) -> None:
    """ValueError unless every prompt has samples to compare."""
    if rewards_PG.ndim != 2:
        raise ValueError(f"rewards must be [prompts, samples], got {tuple(rewards_PG.shape)}")
    if rewards_PG.shape[1] < 2:
        raise ValueError(
            "this advantage compares the samples of a prompt, but there is one of each; set "
            "data.samples_per_prompt to 2 or more"
        )


def _centred(rewards_PG: Tensor) -> Tensor:
    rewards_PG = rewards_PG.float()
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    return torch.where(has_spread(rewards_PG)[:, None], centred_PG, 0.0)


def has_spread(rewards_PG: Tensor) -> Tensor:
    """``[P]`` bool: whether the rewards of a prompt's samples differ (NaN counts as differing)."""
    return (rewards_PG != rewards_PG[:, :1]).any(dim=1)
