"""Discounted sums over what follows a token, for all tokens of a batch at once."""

import torch
from torch import Tensor

from hybridflow.batch import Ragged


def discounted_sums(values_T: Tensor, rows: Ragged, discount: float) -> Tensor:
    """``[T]`` ``sum over k >= 0 of discount^k * values[t + k]`` within each token's response.

    The span that is summed doubles until it covers the longest response: ``log2(longest)``
    passes over the batch.

    Args:
        values_T: one value per token of ``rows``, in their order.
        rows: whose row lengths count.
    """
    places_T = torch.arange(len(values_T))
    ends_T = torch.repeat_interleave(rows.offsets[1:], rows.lengths)
    longest = int(rows.lengths.max()) if len(rows) else 0
    sums_T, span = values_T, 1
    while span < longest:
        further_T = places_T + span
        inside_T = further_T < ends_T
        taken_T = sums_T[further_T.clamp(max=len(values_T) - 1)]
        sums_T = sums_T + torch.where(inside_T, discount**span * taken_T, 0.0)
        span *= 2
    return sums_T


def at_last_tokens(values_S: Tensor, rows: Ragged) -> Tensor:
    """``[T]`` float64 zeros but for each response's last token, which has its value.

    A response without a token has no place for its value.
    """
    placed_T = torch.zeros(len(rows.values), dtype=torch.float64)
    told_S = rows.lengths > 0
    placed_T[rows.offsets[1:][told_S] - 1] = values_S[told_S].double()
    return placed_T
