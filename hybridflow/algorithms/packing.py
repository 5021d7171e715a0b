"""Samples laid end to end as packs: no padding, and each prompt once for all its responses.

The samples of a group have one prompt, so its hidden states are the same for each. A pack holds
the prompt once and then the responses; only attention needs every sequence whole, and reads it
through an index. A row feeds ``prompt + response[:-1]`` to the model: the last token has no
successor to predict.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import Ragged


@dataclass(frozen=True)
class Pack:
    """One micro-batch.

    Attributes:
        input_ids_T: ``[T]`` int64 tokens that the model computes.
        position_ids_T: ``[T]`` int64 place of each in its sequence.
        offsets_N: ``[sequences + 1]`` int32 where sequences start and end (``cu_seqlens``) among
            the E places of all whole sequences end to end.
        longest: tokens of the longest sequence.
        expand_E: ``[E]`` int64 token of the pack at each place of the whole sequences; None when
            no prompt is shared, so that E = T and places are tokens.
        place_T: ``[T]`` int64 the first place of each token: ``expand_E[place_T] = arange(T)``.
        predict_R: ``[R]`` int64 tokens whose successor is a response token that is predicted; a
            shared prompt's last one is there for every response.
        labels_R: ``[R]`` int64 these response tokens.
        source_R: ``[R]`` int64 their places in the batch's flat response values.
        sequence_R: ``[R]`` int64 the sequence of the pack that each belongs to.
        responses_N: ``[sequences]`` int64 predicted response tokens of each; a response is never
            cut over two packs.
        rows_N: ``[sequences]`` int64 the batch's response that each is.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    offsets_N: Tensor
    longest: int
    expand_E: Tensor | None
    place_T: Tensor | None
    predict_R: Tensor
    labels_R: Tensor
    source_R: Tensor
    sequence_R: Tensor
    responses_N: Tensor
    rows_N: Tensor

    def predicting(self, chosen_R: Tensor) -> "Pack":
        """The same pack, of which some response tokens are predicted no more: a loss that looks at
        whole responses is not to see them."""
        sequence_R = self.sequence_R[chosen_R]
        return replace(
            self,
            predict_R=self.predict_R[chosen_R],
            labels_R=self.labels_R[chosen_R],
            source_R=self.source_R[chosen_R],
            sequence_R=sequence_R,
            responses_N=torch.bincount(sequence_R, minlength=len(self.rows_N)),
        )

    def to(self, device: torch.device) -> "Pack":
        """The same pack on another device."""
        moved: dict[str, Any] = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }
        return Pack(**moved)


def bins_first_fit_decreasing(sizes: list[int], capacity: int) -> list[list[int]]:
    """Indices of ``sizes`` in bins of at most ``capacity``, largest items first."""
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
    prompts: Ragged,
    responses: Ragged,
    max_tokens: int,
    *,
    share_prompts: bool = True,
    kept_S: Tensor | None = None,
    whole_groups: bool = False,
    trained_T: Tensor | None = None,
) -> list[Pack]:
    """Packs of at most ``max_tokens`` input tokens that hold every row with a response.

    Args:
        prompts: token ids of P prompts, none empty.
        responses: token ids of P * G responses; response i answers prompt i // G.
        share_prompts: whether responses of one prompt may share it.
        kept_S: ``[P * G]`` bool, rows to pack; None: all.
        whole_groups: whether all responses of a prompt must be in one pack, one behind the other.
        trained_T: ``[T]`` bool of the responses' tokens: those that are predicted; None: all.

    Raises:
        ValueError: a prompt is empty, or a row or group is longer than ``max_tokens``.
    """
    if len(responses) == 0:
        return []
    group, odd = divmod(len(responses), len(prompts))
    assert not odd, "every prompt has the same number of responses"
    prompt_lengths = prompts.lengths.tolist()
    kept_lengths = responses.lengths if kept_S is None else responses.lengths * kept_S
    chunks: list[list[int]] = []  # samples of one prompt, which stay in one pack
    sizes: list[int] = []
    for row, length in enumerate(kept_lengths.tolist()):
        if length == 0:
            continue
        prompt = prompt_lengths[row // group]
        _check_row(row, prompt, prompt + length - 1, max_tokens)
        same = share_prompts and chunks and chunks[-1][0] // group == row // group
        if same and (whole_groups or sizes[-1] + length - 1 <= max_tokens):
            chunks[-1].append(row)
            sizes[-1] += length - 1
        else:
            chunks.append([row])
            sizes.append(prompt + length - 1)
    values = torch.cat([prompts.values, responses.values])
    units = _groups(chunks, group) if whole_groups else [[i] for i in range(len(chunks))]
    unit_sizes = [sum(sizes[i] for i in unit) for unit in units]
    _check_units(units, unit_sizes, chunks, max_tokens)
    return [
        _pack([chunks[i] for u in chosen for i in units[u]], prompts, responses, values, trained_T)
        for chosen in bins_first_fit_decreasing(unit_sizes, max_tokens)
    ]


def _groups(chunks: list[list[int]], group: int) -> list[list[int]]:
    """Indices of the chunks of each prompt that has any."""
    groups: dict[int, list[int]] = {}
    for index, chunk in enumerate(chunks):
        groups.setdefault(chunk[0] // group, []).append(index)
    return list(groups.values())


def _check_units(
    units: list[list[int]], sizes: list[int], chunks: list[list[int]], max_tokens: int
) -> None:
    for unit, size in zip(units, sizes, strict=True):
        if size > max_tokens:
            first, last = chunks[unit[0]][0], chunks[unit[-1]][-1]
            raise ValueError(
                f"samples {first} to {last}, the responses of one prompt, have {size} tokens with "
                f"their prompt, more than micro_batch_tokens={max_tokens}; raise "
                "micro_batch_tokens or lower data.max_tokens"
            )


def _check_row(row: int, prompt: int, size: int, max_tokens: int) -> None:
    if prompt == 0:
        raise ValueError(f"the prompt of sample {row} is empty; drop such rows from the data")
    if size > max_tokens:
        raise ValueError(
            f"sample {row} has {size} tokens of prompt and response, more than "
            f"micro_batch_tokens={max_tokens}; raise micro_batch_tokens or lower "
            "max_prompt_tokens or max_tokens"
        )


def _pack(
    chunks: list[list[int]],
    prompts: Ragged,
    responses: Ragged,
    values: Tensor,
    trained_T: Tensor | None,
) -> Pack:
    """Packs chunks: of each, the prompt, then the responses but for their last tokens.

    ``values`` are all prompts, then all responses. N sequences in C chunks.
    """
    rows_N = torch.tensor([row for chunk in chunks for row in chunk])
    chunk_of_N = torch.repeat_interleave(torch.tensor([len(chunk) for chunk in chunks]))
    prompt_of_N = rows_N // (len(responses) // len(prompts))
    first_N = torch.cat([rows_N.new_ones(1), chunk_of_N.diff()]) > 0
    prompt_N, response_N = prompts.lengths[prompt_of_N], responses.lengths[rows_N]

    # A sequence's new tokens: the prompt where it is the chunk's first, then the response's.
    new_N2 = torch.stack([torch.where(first_N, prompt_N, 0), response_N - 1], dim=1)
    start_N2 = _offsets(new_N2.flatten())[:-1].view(-1, 2)
    prompt_start_N = start_N2[first_N, 0][chunk_of_N]
    from_N2 = torch.stack(
        [prompts.offsets[prompt_of_N], len(prompts.values) + responses.offsets[rows_N]], dim=1
    )
    position_N2 = torch.stack([torch.zeros_like(prompt_N), prompt_N], dim=1)
    offsets_N = _offsets(prompt_N + response_N - 1)
    expand_E = _spans(
        torch.stack([prompt_start_N, start_N2[:, 1]], dim=1),
        torch.stack([prompt_N, response_N - 1], dim=1),
    )
    last_prompt_N = prompt_start_N + prompt_N - 1
    source_R = _spans(responses.offsets[rows_N], response_N)
    shared = not bool(first_N.all())
    predict_R = _spans(
        torch.stack([last_prompt_N, start_N2[:, 1]], dim=1),
        torch.stack([torch.ones_like(prompt_N), response_N - 1], dim=1),
    )
    sequence_R = torch.repeat_interleave(response_N)
    if trained_T is not None:
        kept_R = trained_T[source_R]
        source_R, predict_R, sequence_R = source_R[kept_R], predict_R[kept_R], sequence_R[kept_R]
    return Pack(
        input_ids_T=values[_spans(from_N2, new_N2)].long(),
        position_ids_T=_spans(position_N2, new_N2),
        offsets_N=offsets_N.int(),
        longest=int((prompt_N + response_N).max()) - 1,
        expand_E=expand_E if shared else None,
        place_T=_first_places(expand_E, int(new_N2.sum())) if shared else None,
        predict_R=predict_R,
        labels_R=responses.values[source_R].long(),
        source_R=source_R,
        sequence_R=sequence_R,
        responses_N=torch.bincount(sequence_R, minlength=len(rows_N)),
        rows_N=rows_N,
    )


def _first_places(expand_E: Tensor, tokens: int) -> Tensor:
    places_E = torch.arange(len(expand_E))
    unset_T = places_E.new_full((tokens,), len(expand_E))
    return unset_T.scatter_reduce(0, expand_E, places_E, "amin")


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """``arange(start, start + length)`` of each entry, end to end."""
    starts, lengths = starts.flatten(), lengths.flatten()
    offsets = _offsets(lengths)
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
    return torch.arange(int(offsets[-1])) + shift
