"""Policy losses that hold the ratio of a single token in bounds."""

import torch
from torch import Tensor

from hybridflow.algorithms.losses.base import TokenInputs, TokenLoss, entropy_estimate


def ppo_clip(inputs: TokenInputs) -> TokenLoss:
    """Clipped surrogate objective.

    PPO (Schulman et al., 2017, arXiv:1707.06347), equation 7, with DAPO's asymmetric bounds
    (Yu et al., 2025, arXiv:2503.14476, "clip-higher")::

        loss = -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A),  ratio = exp(logp - old_logp)

    Metrics: ``ratio_mean``; ``clip_fraction``, the share of tokens at which the bound cut the
    gradient; ``entropy_estimate``, -logp, whose mean is the policy's entropy while sampling is
    on-policy.
    """
    ratio_T, advantages_T = inputs.ratio_T, inputs.told_advantages()
    loss_T, cut_T = clipped_surrogate(ratio_T, advantages_T, inputs.clip_low, inputs.clip_high)
    metrics_T = {
        "ratio_mean": ratio_T.detach(),
        "clip_fraction": cut_T,
        "entropy_estimate": entropy_estimate(inputs),
    }
    return TokenLoss(loss_T, metrics_T)


def dual_clip(inputs: TokenInputs) -> TokenLoss:
    """PPO's clipped surrogate whose loss is bounded for bad samples too.

    Ye et al., 2020 (arXiv:1912.09729), dual-clip PPO, with ``c = dual_clip > 1``::

        objective = max(min(ratio * A, clip(ratio) * A), c * A)  where A < 0, PPO's elsewhere

    so that a ratio that has run away no longer moves the weights. Metrics: those of ``ppo_clip``
    and ``dual_clip_fraction``, the share of tokens at which the second bound cut the gradient.
    """
    advantages_T = inputs.told_advantages()
    single = ppo_clip(inputs)
    bound_T = -inputs.dual_clip * advantages_T
    cut_T = (advantages_T < 0) & (single.loss_T > bound_T)
    metrics_T = {**single.metrics_T, "dual_clip_fraction": cut_T.detach().float()}
    return TokenLoss(torch.where(cut_T, bound_T, single.loss_T), metrics_T)


def cispo(inputs: TokenInputs) -> TokenLoss:
    """REINFORCE weighted by a bounded ratio that carries no gradient.

    CISPO (MiniMax-M1, 2025, arXiv:2506.13585), equations 4 and 5::

        loss = -stop_gradient(clip(ratio, 1 - low, 1 + high)) * A * logp

    No token loses its gradient. The paper bounds the ratio from above alone: give ``clip`` a low
    bound near 1. Metrics: as ``ppo_clip``'s; ``clip_fraction`` counts bounded ratios.
    """
    ratio_T = inputs.ratio_T.detach()
    weight_T = ratio_T.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    metrics_T = {
        "ratio_mean": ratio_T,
        "clip_fraction": (weight_T != ratio_T).float(),
        "entropy_estimate": entropy_estimate(inputs),
    }
    return TokenLoss(-weight_T * inputs.told_advantages() * inputs.logprobs_T, metrics_T)


def sapo(inputs: TokenInputs) -> TokenLoss:
    """A smooth gate in the place of a bound.

    SAPO (Gao et al., 2025, arXiv:2511.20347), section 3::

        loss = -4 / tau * sigmoid(tau * (ratio - 1)) * A
        tau  = tau_positive where A > 0, tau_negative elsewhere

    At a ratio of 1 the gradient is REINFORCE's; it fades as the ratio leaves 1, faster for the
    larger tau. Metrics: ``ratio_mean``, ``entropy_estimate``.
    """
    ratio_T, advantages_T = inputs.ratio_T, inputs.told_advantages()
    tau_T = torch.where(advantages_T > 0, inputs.tau_positive, inputs.tau_negative)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1)) * (4 / tau_T)
    metrics_T = {"ratio_mean": ratio_T.detach(), "entropy_estimate": entropy_estimate(inputs)}
    return TokenLoss(-gate_T * advantages_T, metrics_T)


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """``[T]`` ``-min(ratio * A, clip(ratio) * A)``, and 1.0 where the bound cut the gradient."""
    free_T = ratio_T * advantages_T
    bounded_T = ratio_T.clamp(1 - low, 1 + high) * advantages_T
    return -torch.minimum(free_T, bounded_T), (bounded_T < free_T).detach().float()
