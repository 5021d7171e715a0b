"""Discounted sums over what follows a token, for all tokens of a batch at once."""

import torch
from torch import Tensor

from hybridflow.batch import Ragged
from hybridflow.ragged import RUN, spread_over

_BLOCK = 64


def discounted_sums(values_T: Tensor, rows: Ragged, discount: float) -> Tensor:
    """``[T]`` ``sum over k >= 0 of discount^k * values[t + k]`` within each token's response.

    Responses are cut into blocks; one product with a triangle of the discount's powers sums within
    them, and what follows a block comes from the sums over blocks, found in the same way. A run of
    responses at a time: memory that is touched for the first time costs more than the sums. No sum
    spans two responses, so a huge value in one costs the others no digit.

    Args:
        values_T: one value per token of ``rows``, in their order.
        rows: whose row lengths count.
    """
    if len(values_T) <= RUN:
        return _discounted(values_T, rows, discount)
    result_T = torch.empty_like(values_T)
    for run, span in rows.runs():
        result_T[span] = _discounted(values_T[span], rows[run], discount)
    return result_T


def _discounted(values_T: Tensor, rows: Ragged, discount: float) -> Tensor:
    blocks_S = (rows.lengths + _BLOCK - 1) // _BLOCK
    ends_S = blocks_S.cumsum(0)
    blocks = Ragged(torch.empty(int(blocks_S.sum())), torch.cat([ends_S.new_zeros(1), ends_S]))
    shift_S = blocks.offsets[:-1] * _BLOCK - rows.offsets[:-1]
    place_T = spread_over(shift_S, rows.lengths).add_(torch.arange(len(values_T)))
    padded_NB = values_T.new_zeros(len(blocks.values), _BLOCK)
    padded_NB.view(-1).index_copy_(0, place_T, values_T)

    steps_B = torch.arange(_BLOCK, dtype=values_T.dtype)
    powers_BB = torch.tril(discount ** (steps_B[:, None] - steps_B).clamp(min=0))
    sums_NB = padded_NB @ powers_BB
    if len(blocks) and int(blocks_S.max()) > 1:
        after_N = _next(discounted_sums(sums_NB[:, 0], blocks, discount**_BLOCK), blocks)
        sums_NB += after_N[:, None] * discount ** (_BLOCK - steps_B)
    return sums_NB.view(-1).index_select(0, place_T)


def _next(values_N: Tensor, rows: Ragged) -> Tensor:
    """``[N]`` the value after each within its row, 0 after the last."""
    next_N = torch.cat([values_N[1:], values_N.new_zeros(1)])
    next_N[rows.offsets[1:][rows.lengths > 0] - 1] = 0.0
    return next_N


def at_last_tokens(values_S: Tensor, rows: Ragged) -> Tensor:
    """``[T]`` float64 zeros but for each response's last token, which has its value.

    A response without a token has no place for its value.
    """
    placed_T = torch.zeros(len(rows.values), dtype=torch.float64)
    told_S = rows.lengths > 0
    placed_T[rows.offsets[1:][told_S] - 1] = values_S[told_S].double()
    return placed_T
