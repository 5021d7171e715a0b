"""Rows of prompt and response as packs without padding (the THD layout)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import Ragged


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


def pack_rows(prompts: Ragged, responses: Ragged, max_tokens: int) -> list[Pack]:
    """Packs of at most ``max_tokens`` input tokens that hold every row with a response.

    Args:
        prompts: token ids of P prompts, none empty.
        responses: token ids of P * G responses; response i answers prompt i // G.

    Raises:
        ValueError: a prompt is empty, or a row is longer than ``max_tokens``.
    """
    if len(responses) == 0:
        return []
    group, odd = divmod(len(responses), len(prompts))
    assert not odd, "every prompt has the same number of responses"
    rows_S = (responses.lengths > 0).nonzero()[:, 0]
    prompt_lengths_S = prompts.lengths[rows_S // group]
    sizes_S = prompt_lengths_S + responses.lengths[rows_S] - 1
    _check_rows(rows_S, prompt_lengths_S, sizes_S, max_tokens)
    values = torch.cat([prompts.values, responses.values])
    return [
        _pack(rows_S[chosen], prompts, responses, values)
        for chosen in bins_first_fit_decreasing(sizes_S.tolist(), max_tokens)
    ]


def _check_rows(rows_S: Tensor, prompt_S: Tensor, sizes_S: Tensor, max_tokens: int) -> None:
    if (prompt_S == 0).any():
        row = int(rows_S[(prompt_S == 0).nonzero()[0]])
        raise ValueError(f"the prompt of sample {row} is empty; drop such rows from the data")
    if (sizes_S > max_tokens).any():
        place = int(sizes_S.argmax())
        raise ValueError(
            f"sample {int(rows_S[place])} has {int(sizes_S[place])} tokens of prompt and response, "
            f"more than micro_batch_tokens={max_tokens}; raise micro_batch_tokens or lower "
            "max_prompt_tokens or max_tokens"
        )


def _pack(rows_N: Tensor, prompts: Ragged, responses: Ragged, values: Tensor) -> Pack:
    """Packs the given samples in order; ``values`` are all prompts, then all responses."""
    prompt_of_N = rows_N // (len(responses) // len(prompts))
    prompt_N, response_N = prompts.lengths[prompt_of_N], responses.lengths[rows_N]
    sizes_N = prompt_N + response_N - 1
    offsets_N = _offsets(sizes_N)
    position_T = _ranges(torch.zeros_like(sizes_N), sizes_N)
    response_start_N = len(prompts.values) + responses.offsets[rows_N] - prompt_N
    in_prompt_T = position_T < torch.repeat_interleave(prompt_N, sizes_N)
    start_T = torch.where(
        in_prompt_T,
        torch.repeat_interleave(prompts.offsets[prompt_of_N], sizes_N),
        torch.repeat_interleave(response_start_N, sizes_N),
    )
    source_R = _ranges(responses.offsets[rows_N], response_N)
    return Pack(
        input_ids_T=values[start_T + position_T].long(),
        position_ids_T=position_T,
        offsets_N=offsets_N.int(),
        longest=int(sizes_N.max()),
        predict_R=_ranges(offsets_N[:-1] + prompt_N - 1, response_N),
        labels_R=responses.values[source_R].long(),
        source_R=source_R,
    )


def _offsets(lengths_N: Tensor) -> Tensor:
    return torch.cat([lengths_N.new_zeros(1), lengths_N.cumsum(0)])


def _ranges(starts_N: Tensor, lengths_N: Tensor) -> Tensor:
    """``arange(start, start + length)`` of each row, end to end."""
    offsets_N = _offsets(lengths_N)
    shift_T = torch.repeat_interleave(starts_N - offsets_N[:-1], lengths_N)
    return torch.arange(int(offsets_N[-1])) + shift_T
