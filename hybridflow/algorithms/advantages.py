"""How much better a sample was than its alternatives."""

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


def has_spread(rewards_PG: Tensor) -> Tensor:
    """``[P]`` bool: whether the rewards of a prompt's samples differ (NaN counts as differing)."""
    return (rewards_PG != rewards_PG[:, :1]).any(dim=1)
