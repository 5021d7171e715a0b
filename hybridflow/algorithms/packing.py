"""Rows of prompt and response as packs without padding (the THD layout)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pack:
    """Several rows laid end to end: one micro-batch.

    A row feeds ``prompt + response[:-1]`` to the model: its last token has no successor to
    predict. Response token i is predicted at the position of the token before it.

    Attributes:
        input_ids_T: ``[T]`` int64 tokens of all rows.
        position_ids_T: ``[T]`` int64, from 0 in every row.
        offsets_N: ``[rows + 1]`` int32, where rows start and end (``cu_seqlens``).
        longest: tokens of the longest row.
        predict_R: ``[R]`` int64 positions in T whose successor is a response token.
        labels_R: ``[R]`` int64 these response tokens.
        source_R: ``[R]`` int64 their places in the batch's flat response values.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    offsets_N: Tensor
    longest: int
    predict_R: Tensor
    labels_R: Tensor
    source_R: Tensor

    def to(self, device: torch.device) -> "Pack":
        """The same pack on another device."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if name != "longest"
        }
        return Pack(longest=self.longest, **moved)


def bins_first_fit_decreasing(sizes: list[int], capacity: int) -> list[list[int]]:
    """Indices of ``sizes`` in bins of at most ``capacity``, largest items first.

    Items of one bin are in order of falling size (then of index), so that equal lengths lie side
    by side and attention can treat them as one rectangle.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        target = next((b for b, free in enumerate(room) if free >= size), None)
        if target is None:
            target = len(bins)
            bins.append([])
            room.append(capacity)
        bins[target].append(index)
        room[target] -= size
    return bins


def pack_rows(
    prompts: list[Tensor],
    response_values: Tensor,
    response_offsets: Tensor,
    max_tokens: int,
) -> list[Pack]:
    """Packs of at most ``max_tokens`` input tokens that hold every row with a response.

    Args:
        prompts: prompt ids of each sample, ``[S]`` of int64 ``[P_s]``, none empty.
        response_values: ``[sum R_s]`` int64 response tokens of all samples.
        response_offsets: ``[S + 1]`` where each sample's response starts in them.

    Raises:
        ValueError: a prompt is empty, or a row is longer than ``max_tokens``.
    """
    starts = response_offsets.tolist()
    lengths = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    assert len(lengths) == len(prompts), "as many prompts as responses"
    rows = [row for row, length in enumerate(lengths) if length > 0]
    sizes = [len(prompts[row]) + lengths[row] - 1 for row in rows]
    _check_rows(rows, prompts, sizes, max_tokens)
    return [
        _pack([rows[i] for i in chosen], prompts, response_values, starts)
        for chosen in bins_first_fit_decreasing(sizes, max_tokens)
    ]


def _check_rows(rows: list[int], prompts: list[Tensor], sizes: list[int], max_tokens: int) -> None:
    for row, size in zip(rows, sizes, strict=True):
        if len(prompts[row]) == 0:
            raise ValueError(f"the prompt of sample {row} is empty; drop such rows from the data")
        if size > max_tokens:
            raise ValueError(
                f"sample {row} has {size} tokens of prompt and response, more than "
                f"micro_batch_tokens={max_tokens}; raise micro_batch_tokens or lower "
                "max_prompt_tokens or max_tokens"
            )


def _pack(rows: list[int], prompts: list[Tensor], values: Tensor, starts: list[int]) -> Pack:
    pieces: list[Tensor] = []
    prompt_lengths, response_lengths = [], []
    for row in rows:
        start, end = starts[row], starts[row + 1]
        pieces += [prompts[row], values[start : end - 1]]
        prompt_lengths.append(len(prompts[row]))
        response_lengths.append(end - start)
    prompt_N = torch.tensor(prompt_lengths)
    response_N = torch.tensor(response_lengths)
    offsets_N = _offsets(prompt_N + response_N - 1)
    source_R = _ranges(torch.tensor([starts[row] for row in rows]), response_N)
    return Pack(
        input_ids_T=torch.cat(pieces).long(),
        position_ids_T=_ranges(torch.zeros_like(prompt_N), prompt_N + response_N - 1),
        offsets_N=offsets_N.int(),
        longest=int((prompt_N + response_N).max()) - 1,
        predict_R=_ranges(offsets_N[:-1] + prompt_N - 1, response_N),
        labels_R=values[source_R].long(),
        source_R=source_R,
    )


def _offsets(lengths_N: Tensor) -> Tensor:
    return torch.cat([lengths_N.new_zeros(1), lengths_N.cumsum(0)])


def _ranges(starts_N: Tensor, lengths_N: Tensor) -> Tensor:
    """``arange(start, start + length)`` of each row, end to end."""
    offsets_N = _offsets(lengths_N)
    shift_T = torch.repeat_interleave(starts_N - offsets_N[:-1], lengths_N)
    return torch.arange(int(offsets_N[-1])) + shift_T
