"""Corrections for samples whose policy is not the one that the trainer computes.

The rollout engine samples under other kernels, in another precision, perhaps from older weights;
its probabilities differ from the trainer's for the same tokens. Both corrections here carry no
gradient, and leave a loss as it is where the two agree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.losses import Sequences
from hybridflow.recipe.names import hint

METHODS = ("truncated", "masked", "rejection")
LEVELS = ("token", "sequence", "sequence_sum")


@dataclass(frozen=True)
class Correction:
    """What the ratio of trainer to rollout makes of T tokens.

    Attributes:
        weights_T: ``[T]`` float32 factor of each token's loss.
        kept_T: ``[T]`` bool: tokens that take part in the loss and in its mean.
        corrected_T: ``[T]`` bool: tokens whose ratio was out of bounds.
    """

    weights_T: Tensor
    kept_T: Tensor
    corrected_T: Tensor


def correct(
    logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    sequences: Sequences,
    method: str,
    level: str,
    low: float,
    high: float,
) -> Correction:
    """Weights, or a choice of tokens, by the ratio ``trainer / rollout`` before the update.

    The ratio ``w`` of a token is its own (``token``), the geometric mean over its response
    (``sequence``, ``exp(mean d)`` with ``d = logp - rollout_logp``) or the response's whole ratio
    (``sequence_sum``, ``exp(sum d)``: unbiased, of high variance). It becomes

    - ``truncated``: the weight ``min(w, high)`` (truncated importance sampling, Yao et al., 2025,
      "Your efficient RL framework secretly brings you off-policy RL training"; Ionides, 2008);
    - ``masked``: the weight ``w`` within ``[low, high]``, else 0 (IcePop, Ling team, 2025,
      arXiv:2510.18855); means still count the token;
    - ``rejection``: the weight 1 within ``[low, high]``; tokens out of it take no part, means do
      not count them either (rejection sampling of tokens, or of whole responses).

    Args:
        logprobs_T, rollout_logprobs_T: of the sampled tokens under the trainer's weights before
            the update, and as the rollout reported them, in nats.
        sequences: which response each token belongs to.
    """
    if method not in METHODS:
        raise ValueError(f"correction method '{method}' is unknown: {hint(method, METHODS)}")
    difference_T = (logprobs_T - rollout_logprobs_T).float()
    ratio_T = torch.exp(_at_level(difference_T, sequences, level))
    over_T, all_T = ratio_T > high, torch.ones_like(ratio_T, dtype=torch.bool)
    if method == "truncated":
        return Correction(ratio_T.clamp(max=high), all_T, over_T)
    # A ratio that is not a number is within no bounds.
    inside_T = (ratio_T >= low) & (ratio_T <= high)
    if method == "masked":
        return Correction(torch.where(inside_T, ratio_T, 0.0), all_T, ~inside_T)
    return Correction(inside_T.float(), inside_T, ~inside_T)


def _at_level(difference_T: Tensor, sequences: Sequences, level: str) -> Tensor:
    if level not in LEVELS:
        raise ValueError(f"correction level '{level}' is unknown: {hint(level, LEVELS)}")
    if level == "token":
        return difference_T
    return sequences.mean(difference_T) if level == "sequence" else sequences.sum(difference_T)


def off_policy_masked(
    logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    advantages_T: Tensor,
    sequences: Sequences,
    bound: float,
) -> Tensor:
    """``[T]`` bool: bad tokens of responses that the policy would hardly sample any more.

    DeepSeek-V3.2 (2025, arXiv:2512.02556), off-policy sequence masking: a token counts no more
    where its advantage is negative and its response's mean ``rollout_logp - logp``, an estimate
    of the divergence from the policy that sampled, exceeds ``bound``. What is learnt from one's own
    mistakes stays; the mistakes of another policy push it anywhere.

    Args:
        logprobs_T: of the current policy; no gradient passes.
    """
    divergence_T = sequences.mean((rollout_logprobs_T - logprobs_T.detach()).float())
    return (advantages_T < 0) & (divergence_T > bound)
