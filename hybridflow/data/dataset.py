"""Prompts and responses as token ids, without those that are too long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridflow.data.encode import ANSWER, CHOSEN, REJECTED, encode
from hybridflow.data.oddities import oddities
from hybridflow.data.readers import Table, raise_faults, read_table
from hybridflow.data.rendering import DataSettings, Renderer
from hybridflow.recipe.catalogue import column_keys
from hybridflow.recipe.names import hint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUPERVISED = ("prompts", "answers", "targets")


@dataclass(frozen=True)
class PromptRow:
    """One prompt as the model sees it.

    Attributes:
        prompt_ids: the tokens of ``prompt_text``.
        answer: the data's value as it stands there; None where it is not asked for.
        row: the whole row of data.
        answer_ids: of the answer with its end, the targets of supervised steps; of a conversation
            all that follows the prompt up to the assistant's last word.
        answer_mask: which of them are trained on.
        chosen_ids, rejected_ids: of a pair, with their ends.
        label: whether the answer is a desirable one.
        margin: by how much the chosen response is the better one.
    """

    prompt_ids: list[int]
    prompt_text: str
    answer: Any
    row: dict[str, Any]
    answer_ids: list[int] = field(default_factory=list)
    answer_mask: list[bool] = field(default_factory=list)
    chosen_ids: list[int] = field(default_factory=list)
    rejected_ids: list[int] = field(default_factory=list)
    label: bool | None = None
    margin: float | None = None


class IdRows:
    """Ragged token ids in one int32 array: 4 bytes a token however many rows there are."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        self.values = np.fromiter((i for row in rows for i in row), np.int32, self.offsets[-1])

    def __getitem__(self, index: int) -> list[int]:
        return self.values[self.offsets[index] : self.offsets[index + 1]].tolist()

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 [rows]."""
        return np.diff(self.offsets)


class PromptDataset:
    """The rows of a data file that fit, tokenised, in the file's order.

    ``total`` counts the file's rows, ``dropped`` those whose prompt has more than
    ``max_prompt_tokens`` tokens, or prompt and response together more than ``max_tokens``.
    ``responses`` are ids by what they are, see ``Encoded``. ``oddities`` tells of rows that are
    hardly meant, in words.
    """

    def __init__(
        self, table: Table, renderer: Renderer, settings: DataSettings, inputs: frozenset[str]
    ) -> None:
        self._table = table
        self._answer_column = settings.answer_column if "answers" in inputs else None
        encoded = encode(table, renderer, settings, inputs)
        prompts = encoded.prompts
        empty = [f"{table.where(i)}: the prompt is empty" for i, p in enumerate(prompts) if not p]
        raise_faults(table.path, empty)
        kept = _fitting(table, settings, prompts, list(encoded.responses.values()))
        self.path = table.path
        self.oddities = oddities(table.path, encoded, renderer)
        self.total = len(prompts)
        self.dropped = self.total - len(kept)
        self._rows = kept
        self._texts = [encoded.texts[i] for i in kept]
        self.prompts = IdRows([prompts[i] for i in kept])
        self.responses = {
            name: IdRows([rows[i] for i in kept]) for name, rows in encoded.responses.items()
        }
        trained, labels, margins = encoded.trained, encoded.labels, encoded.margins
        self._trained = None if trained is None else [trained[i] for i in kept]
        self._labels = None if labels is None else [labels[i] for i in kept]
        self._margins = None if margins is None else [margins[i] for i in kept]

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> PromptRow:
        """Row ``index`` of those that were kept, 0 <= index < len."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        data = dict(self._table.rows[self._rows[index]])
        ids = {name: rows[index] for name, rows in self.responses.items()}
        answer_ids = ids.get(ANSWER, [])
        return PromptRow(
            prompt_ids=self.prompts[index],
            prompt_text=self._texts[index],
            answer=None if self._answer_column is None else data[self._answer_column],
            row=data,
            answer_ids=answer_ids,
            answer_mask=self._trained[index] if self._trained else [True] * len(answer_ids),
            chosen_ids=ids.get(CHOSEN, []),
            rejected_ids=ids.get(REJECTED, []),
            label=self._labels[index] if self._labels else None,
            margin=self._margins[index] if self._margins else None,
        )

    def where(self, index: int) -> str:
        """``file:line`` of row ``index`` of those that were kept."""
        return self._table.where(self._rows[index])

    def longest(self) -> tuple[int, int]:
        """The kept row of which a forward pass sees most tokens, and their number: those of each
        response but its last one, with their prompts."""
        sizes = [self.prompts.lengths + rows.lengths - 1 for rows in self.responses.values()]
        total = np.sum(sizes or [self.prompts.lengths], axis=0)
        return int(total.argmax()), int(total.max())

    def longest_sample(self) -> tuple[int, int]:
        """The kept row with the longest prompt and one response of it, and their tokens."""
        sizes = [self.prompts.lengths + rows.lengths for rows in self.responses.values()]
        longest = np.max(sizes or [self.prompts.lengths], axis=0)
        return int(longest.argmax()), int(longest.max())

    def longest_parts(self) -> tuple[int, int]:
        """Tokens of the longest prompt and of the longest response, of whatever rows."""
        responses = [int(rows.lengths.max()) for rows in self.responses.values()]
        return int(self.prompts.lengths.max()), max(responses, default=0)

    @property
    def left_out(self) -> str:
        """How many rows were too long, for people; empty where all were kept."""
        if not self.dropped:
            return ""
        return (
            f"{self.path}: {self.dropped} of {self.total} rows are longer than "
            "data.max_prompt_tokens or data.max_tokens and left out"
        )


def _fitting(
    table: Table,
    settings: DataSettings,
    prompts: list[list[int]],
    responses: Sequence[list[list[int]]],
) -> list[int]:
    """Rows within the lengths that the recipe sets; ValueError when none is."""
    fits = [len(ids) <= settings.max_prompt_tokens for ids in prompts]
    if not any(fits):
        raise ValueError(
            f"{table.path}: all {len(prompts)} prompts have more than data.max_prompt_tokens="
            f"{settings.max_prompt_tokens} tokens (the shortest has {min(map(len, prompts))}); "
            "raise it"
        )
    kept = [row for row, fit in enumerate(fits) if fit]
    if settings.max_tokens is None or not responses:
        return kept
    sizes = {row: len(prompts[row]) + max(len(ids[row]) for ids in responses) for row in kept}
    within = [row for row in kept if sizes[row] <= settings.max_tokens]
    if not within:
        raise ValueError(
            f"{table.path}: all {len(kept)} rows have more than data.max_tokens="
            f"{settings.max_tokens} tokens (the shortest has {min(sizes.values())}); raise it"
        )
    return within


def load_dataset(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    inputs: Iterable[str] = SUPERVISED,
) -> PromptDataset:
    """Read and tokenise ``path`` as the recipe's ``data`` section says.

    Args:
        inputs: of a graph (without ``eval_``), for which the rows are read.

    Raises:
        ValueError: faults in the file or the settings, with file and line, or no row left.
    """
    renderer = Renderer(tokenizer, settings)
    table = read_table(path)
    wanted = frozenset(inputs) | {"prompts"}
    _check_columns(table, settings, wanted)
    return PromptDataset(table, renderer, settings, wanted)


def _check_columns(table: Table, settings: DataSettings, inputs: frozenset[str]) -> None:
    keys = column_keys(sorted(inputs), settings.messages_column is not None)
    wanted = {key: str(getattr(settings, key)) for key in keys}
    faults = [
        f"{table.path}: there is no column '{column}' (data.{key}); {hint(column, table.columns)}"
        for key, column in wanted.items()
        if column not in table.columns
    ]
    raise_faults(table.path, faults)
