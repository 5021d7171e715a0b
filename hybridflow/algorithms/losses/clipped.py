"""Policy losses that hold the ratio of a single token in bounds."""

import torch
from torch import Tensor

from hybridflow.algorithms.losses.base import TokenInputs, TokenTerms


def ppo_clip(inputs: TokenInputs) -> TokenTerms:
    """Clipped surrogate objective.

    PPO (Schulman et al., 2017, arXiv:1707.06347), equation 7, with DAPO's asymmetric bounds
    (Yu et al., 2025, arXiv:2503.14476, "clip-higher")::

        loss = -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A),  ratio = exp(logp - old_logp)

    Metrics: ``ratio_mean``; ``clip_fraction``, the share of tokens at which the bound cut the
    gradient, of which ``clip_fraction_low`` by the lower bound and ``clip_fraction_high`` by the
    upper; ``entropy_estimate``, -logp, whose mean is the policy's entropy while sampling is
    on-policy.
    """
    ratio_T = inputs.ratio_T
    loss_T, slope_T, cut_T = clipped_surrogate(
        ratio_T, inputs.told_advantages(), inputs.clip_low, inputs.clip_high
    )
    return TokenTerms(loss_T, slope_T, _ratio_sums(ratio_T, cut_T))


def dual_clip(inputs: TokenInputs) -> TokenTerms:
    """PPO's clipped surrogate whose loss is bounded for bad samples too.

    Ye et al., 2020 (arXiv:1912.09729), dual-clip PPO, with ``c = dual_clip > 1``::

        objective = max(min(ratio * A, clip(ratio) * A), c * A)  where A < 0, PPO's elsewhere

    so that a ratio that has run away no longer moves the weights. Metrics: those of ``ppo_clip``
    and ``dual_clip_fraction``, the share of tokens at which the second bound cut the gradient.
    """
    ratio_T, advantages_T = inputs.ratio_T, inputs.told_advantages()
    loss_T, slope_T, cut_T = clipped_surrogate(
        ratio_T, advantages_T, inputs.clip_low, inputs.clip_high
    )
    # Infinite where the advantage is not negative: no second bound there.
    bound_T = torch.mul(advantages_T, -inputs.dual_clip)
    bound_T.masked_fill_(advantages_T >= 0, torch.inf)
    over_T = (loss_T > bound_T).to(loss_T.dtype)
    slope_T.mul_(1 - over_T)
    loss_T = torch.minimum(loss_T, bound_T)
    sums = {**_ratio_sums(ratio_T, cut_T), "dual_clip_fraction": over_T.sum()}
    return TokenTerms(loss_T, slope_T, sums)


def cispo(inputs: TokenInputs) -> TokenTerms:
    """REINFORCE weighted by a bounded ratio that carries no gradient.

    CISPO (MiniMax-M1, 2025, arXiv:2506.13585), equations 4 and 5::

        loss = -stop_gradient(clip(ratio, 1 - low, 1 + high)) * A * logp

    No token loses its gradient. The paper bounds the ratio from above alone: give ``clip`` a low
    bound near 1. Metrics: as ``ppo_clip``'s; ``clip_fraction`` counts bounded ratios.
    """
    ratio_T = inputs.ratio_T
    weight_T = ratio_T.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    slope_T = torch.mul(weight_T, inputs.told_advantages()).neg_()
    sums = _ratio_sums(ratio_T, weight_T.ne_(ratio_T))
    return TokenTerms(slope_T * inputs.logprobs_T.detach(), slope_T, sums)


def sapo(inputs: TokenInputs) -> TokenTerms:
    """A smooth gate in the place of a bound.

    SAPO (Gao et al., 2025, arXiv:2511.20347), section 3::

        loss = -4 / tau * sigmoid(tau * (ratio - 1)) * A
        tau  = tau_positive where A > 0, tau_negative elsewhere

    At a ratio of 1 the gradient is REINFORCE's; it fades as the ratio leaves 1, faster for the
    larger tau. Metrics: ``ratio_mean``, ``entropy_estimate``.
    """
    ratio_T, advantages_T = inputs.ratio_T, inputs.told_advantages()
    sums = {"ratio_mean": ratio_T.sum()}
    good_T = torch.gt(advantages_T, 0, out=torch.empty_like(ratio_T))
    tau_T = good_T.mul_(inputs.tau_positive - inputs.tau_negative).add_(inputs.tau_negative)
    gate_T = (ratio_T - 1).mul_(tau_T).sigmoid_()
    scaled_T = advantages_T * -4
    # The sigmoid's derivative is gate * (1 - gate) * tau, the ratio's by logp itself.
    slope_T = torch.addcmul(gate_T, gate_T, gate_T, value=-1).mul_(ratio_T)
    slope_T.mul_(scaled_T)
    loss_T = gate_T.mul_(scaled_T).div_(tau_T)
    return TokenTerms(loss_T, slope_T, sums)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of tokens or of responses: ``-min(ratio * A, clip(ratio) * A)``; its derivative by the
    logarithm of the ratio; 1.0 where the bound cut that to 0. All new tensors."""
    free = ratio * advantages
    bounded = ratio.clamp(1 - low, 1 + high).mul_(advantages)
    loss = torch.minimum(free, bounded).neg_()
    cut = bounded.lt_(free)
    return loss, free.mul_(cut - 1), cut


def _ratio_sums(ratio_T: Tensor, cut_T: Tensor) -> dict[str, Tensor]:
    return {"ratio_mean": ratio_T.sum(), **clip_sums(cut_T, ratio_T, 1.0)}


def clip_sums(cut_T: Tensor, ratio_T: Tensor, middle: float) -> dict[str, Tensor]:
    """How many tokens a bound cut, all in all and by each bound.

    Args:
        cut_T: 1.0 where a bound cut.
        ratio_T: of tokens, beyond the upper bound where cut and above ``middle``.
    """
    cut, high = (
        cut_T.sum(),
        torch.gt(ratio_T, middle, out=torch.empty_like(cut_T)).mul_(cut_T).sum(),
    )
    return {"clip_fraction": cut, "clip_fraction_low": cut - high, "clip_fraction_high": high}
