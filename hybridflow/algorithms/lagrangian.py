"""Reward under a limit of cost: PPO-Lagrangian, as Safe RLHF uses it."""

import math

from hybridflow.algorithms.advantages.whitened import whiten
from hybridflow.batch import Ragged


def next_multiplier(multiplier: float, mean_cost: float, limit: float, rate: float) -> float:
    """The Lagrange multiplier after a step, moved in its logarithm so that it stays positive.

    Dai et al., 2023 (Safe RLHF, arXiv:2310.12773), appendix B.3::

        ln lambda' = ln lambda + rate * lambda * J_C,  J_C = mean cost - limit

    Args:
        multiplier: lambda, greater than 0.
        rate: alpha, of the multiplier's own gradient ascent.

    Example: ``lambda`` 2 at cost 0.7 over a limit of 0.2 and rate 0.1 becomes ``2 * e^0.1``.
    """
    step = rate * multiplier * (mean_cost - limit)
    return multiplier * math.exp(min(step, _LARGEST_STEP))


_LARGEST_STEP = 50.0
"""Of the logarithm: beyond any bound of the multiplier, and far from overflow."""


def combined_advantages(
    advantages: Ragged, cost_advantages: Ragged, multiplier: float, *, whitened: bool = True
) -> Ragged:
    """One advantage per token, of reward and cost at once.

    Dai et al., 2023 (arXiv:2310.12773), appendix B.3: the gradient of the Lagrangian
    ``J_R - lambda * J_C``, scaled so that its size does not grow with lambda::

        A = (A_R - lambda * A_C) / (1 + lambda)

    Args:
        advantages, cost_advantages: of the same response tokens, not whitened each for itself,
            which would undo their scales.
        whitened: bring the result to mean 0 and variance 1 over all tokens.

    Example: advantages 1 and 0.5 of reward and cost at lambda 3 give -0.125.
    """
    mixed_T = (advantages.values - multiplier * cost_advantages.values) / (1 + multiplier)
    return advantages.with_values(whiten(mixed_T) if whitened else mixed_T)
