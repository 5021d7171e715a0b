"""From a loss per token to one number: weights and a normaliser.

The loss of an optimizer step is ``sum_t weight_t * loss_t / normaliser``, where the sum and the
normaliser run over every token of the global mini-batch. Both are sums, so any split of the rows
over data-parallel ranks, micro-batches or packs gives the same gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.ragged import spread_over
from hybridflow.recipe import catalogue
from hybridflow.recipe.registry import Registry


@dataclass(frozen=True)
class Counted:
    """The tokens of S responses, end to end, of which some take part.

    Attributes:
        ones_T: ``[T]`` float32, 1 where a token takes part, else 0; where all do, one number for
            all of them.
        lengths_S: ``[S]`` tokens of each response.
        counts_S: ``[S]`` float32, of these those that take part.
        divisor: of the aggregation ``constant``.
    """

    ones_T: Tensor
    lengths_S: Tensor
    counts_S: Tensor
    divisor: float

    @property
    def responses(self) -> float:
        """How many responses count: all but those that have lost every token."""
        return float(((self.counts_S > 0) | (self.lengths_S == 0)).sum())


Aggregation = Callable[[Counted], tuple[Tensor, float]]
"""From tokens to their weights and these rows' share of the normaliser."""


def token_mean(told: Counted) -> tuple[Tensor, float]:
    """Every token of the batch counts the same (DAPO, arXiv:2503.14476, eq. 8)."""
    return told.ones_T, float(told.counts_S.double().sum())


def sequence_mean_token_mean(told: Counted) -> tuple[Tensor, float]:
    """The mean over sequences of the mean over a sequence's tokens (GRPO, arXiv:2402.03300,
    eq. 3)."""
    shares_S = 1 / told.counts_S.clamp(min=1)
    return spread_over(shares_S, told.lengths_S).mul_(told.ones_T), told.responses


def sequence_mean_token_sum(told: Counted) -> tuple[Tensor, float]:
    """The mean over sequences of the sum over a sequence's tokens (Dr. GRPO, arXiv:2503.20783,
    without length bias)."""
    return told.ones_T, told.responses


def constant(told: Counted) -> tuple[Tensor, float]:
    """``sequence_mean_token_sum`` divided by a constant, such as the longest possible response (Dr.
    GRPO's own code): a step as large as a mean over tokens, whatever the lengths turn out to be."""
    return told.ones_T / told.divisor, told.responses


_AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_mean_token_sum": sequence_mean_token_sum,
    "constant": constant,
}

AGGREGATIONS = Registry("aggregation", _AGGREGATIONS, aliases=catalogue.AGGREGATIONS.aliases)


def token_weights(
    aggregation: str,
    lengths_S: Tensor,
    divisor: float = 1.0,
    kept_T: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Weights of every response token, and these rows' share of the normaliser.

    Args:
        aggregation: a name of ``AGGREGATIONS``.
        lengths_S: ``[S]`` response lengths in tokens.
        divisor: of ``constant``.
        kept_T: ``[sum(lengths)]`` bool, tokens that take part; None: all. The others weigh 0 and
            are not counted, nor is a response that has lost all its tokens.

    Returns:
        ``[sum(lengths)]`` float32 weights, sequence after sequence, to be read only: they may be
        one number in memory; the normaliser of these rows, to be summed over all ranks that share
        the step.

    Raises:
        UnknownName: ``aggregation`` is not registered.
    """
    average = AGGREGATIONS[aggregation]
    ones_T = torch.ones(1).expand(int(lengths_S.sum())) if kept_T is None else kept_T.float()
    counts_S = lengths_S.float()
    if kept_T is not None and len(lengths_S):
        counts_S = torch.segment_reduce(ones_T, "sum", lengths=lengths_S)
    return average(Counted(ones_T, lengths_S, counts_S, divisor))


def weighted_sum(weights_T: Tensor, loss_R: Tensor, source_R: Tensor | None = None) -> Tensor:
    """The sum of ``weight * loss`` over some tokens, differentiable by the losses.

    Args:
        weights_T: ``[T]`` of ``token_weights``.
        loss_R: ``[R]`` losses.
        source_R: ``[R]`` the place of each in ``weights_T``; None: they are all T, in order.
    """
    if len(weights_T) > 1 and weights_T.stride(0) == 0:
        return loss_R.sum() * weights_T[0]  # one weight for all: nothing to gather or multiply
    weights_R = weights_T if source_R is None else weights_T[source_R]
    return (weights_R * loss_R).sum()
