"""Losses of the log-probability alone."""

from hybridflow.algorithms.losses.base import (
    TokenInputs,
    TokenLoss,
    entropy_estimate,
    with_slope,
)


def reinforce(inputs: TokenInputs) -> TokenLoss:
    """The policy gradient without a ratio or a bound.

    REINFORCE (Williams, 1992), and GPG's objective (Chu et al., 2025, arXiv:2504.02546)::

        loss = -A * logp

    Samples count as the current policy's, also in later mini-batches. Metric:
    ``entropy_estimate``.
    """
    slope_T = -inputs.told_advantages()
    loss_T = with_slope(inputs.logprobs_T, slope_T * inputs.logprobs_T.detach(), slope_T)
    return TokenLoss(loss_T, entropy_estimate(inputs))


def cross_entropy(inputs: TokenInputs) -> TokenLoss:
    """Negative log-likelihood of the response: supervised fine-tuning, ``loss = -logp``."""
    return TokenLoss(-inputs.logprobs_T)
