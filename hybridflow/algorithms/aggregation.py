"""From a loss per token to one number: weights and a normaliser.

The loss of an optimizer step is ``sum_t weight_t * loss_t / normaliser``, where the sum and the
normaliser run over every token of the global mini-batch. Both are sums, so any split of the rows
over data-parallel ranks, micro-batches or packs gives the same gradient.
"""

import torch
from torch import Tensor

from hybridflow.ragged import spread_over
from hybridflow.recipe.names import hint

AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")


def token_weights(
    aggregation: str,
    lengths_S: Tensor,
    divisor: float = 1.0,
    kept_T: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Weights of every response token, and these rows' share of the normaliser.

    - ``token_mean``: every token of the batch counts the same (DAPO, arXiv:2503.14476, eq. 8).
    - ``sequence_mean_token_mean``: the mean over sequences of the mean over a sequence's tokens
      (GRPO, arXiv:2402.03300, eq. 3).
    - ``sequence_mean_token_sum``: the mean over sequences of the sum over a sequence's tokens
      (Dr. GRPO, arXiv:2503.20783, without length bias).
    - ``constant``: that, divided by ``divisor``, such as the longest possible response (Dr. GRPO's
      own code): a step as large as a mean over tokens, whatever the lengths turn out to be.

    Args:
        lengths_S: ``[S]`` response lengths in tokens.
        divisor: of ``constant``.
        kept_T: ``[sum(lengths)]`` bool, tokens that take part; None: all. The others weigh 0 and
            are not counted, nor is a response that has lost all its tokens.

    Returns:
        ``[sum(lengths)]`` float32 weights, sequence after sequence; the normaliser of these rows,
        to be summed over all ranks that share the step.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"aggregation '{aggregation}' is unknown: {hint(aggregation, AGGREGATIONS)}"
        )
    ones_T = torch.ones(int(lengths_S.sum())) if kept_T is None else kept_T.float()
    counts_S = lengths_S.float()
    if kept_T is not None and len(lengths_S):
        counts_S = torch.segment_reduce(ones_T, "sum", lengths=lengths_S)
    if aggregation == "token_mean":
        return ones_T, float(counts_S.double().sum())
    responses = float(((counts_S > 0) | (lengths_S == 0)).sum())
    if aggregation in ("sequence_mean_token_sum", "constant"):
        return ones_T / (divisor if aggregation == "constant" else 1.0), responses
    return spread_over(1 / counts_S.clamp(min=1), lengths_S).mul_(ones_T), responses
