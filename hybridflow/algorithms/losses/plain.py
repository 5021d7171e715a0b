"""Losses of the log-probability alone."""

from hybridflow.algorithms.losses.base import TokenInputs, TokenLoss, entropy_estimate


def reinforce(inputs: TokenInputs) -> TokenLoss:
    """The policy gradient without a ratio or a bound.

    REINFORCE (Williams, 1992), and GPG's objective (Chu et al., 2025, arXiv:2504.02546)::

        loss = -A * logp

    Samples count as the current policy's, also in later mini-batches. Metric:
    ``entropy_estimate``.
    """
    loss_T = -inputs.told_advantages() * inputs.logprobs_T
    return TokenLoss(loss_T, {"entropy_estimate": entropy_estimate(inputs)})


def cross_entropy(inputs: TokenInputs) -> TokenLoss:
    """Negative log-likelihood of the response: supervised fine-tuning, ``loss = -logp``."""
    return TokenLoss(-inputs.logprobs_T)
