"""Prompts and answers as token ids, without those that are too long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridflow.data.readers import Table, raise_faults, read_table
from hybridflow.data.rendering import DataSettings, Renderer
from hybridflow.recipe.names import hint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class PromptRow:
    """One prompt as the model sees it.

    ``prompt_ids`` are the tokens of ``prompt_text``; ``answer_ids`` those of the answer with
    the end of sequence, the targets of supervised steps. ``answer`` is the data's value as it
    stands there, ``row`` the whole row of data.
    """

    prompt_ids: list[int]
    prompt_text: str
    answer_ids: list[int]
    answer: Any
    row: dict[str, Any]


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
    """The rows of a data file whose prompts fit, tokenised, in the file's order.

    ``total`` counts the file's rows, ``dropped`` those whose prompt has more than
    ``max_prompt_tokens`` tokens.
    """

    def __init__(
        self, table: Table, renderer: Renderer, settings: DataSettings, eos_token_id: int
    ) -> None:
        self._table = table
        self._answer_column = settings.answer_column
        texts, answers = _texts(table, renderer, settings)
        prompts = _encode(texts, renderer.encode)
        empty = [f"{table.where(i)}: the prompt is empty" for i, p in enumerate(prompts) if not p]
        raise_faults(table.path, empty)
        kept = [i for i, ids in enumerate(prompts) if len(ids) <= settings.max_prompt_tokens]
        self.path = table.path
        self.total = len(prompts)
        self.dropped = self.total - len(kept)
        if not kept:
            shortest = min(map(len, prompts))
            raise ValueError(
                f"{table.path}: all {self.total} prompts have more than data.max_prompt_tokens="
                f"{settings.max_prompt_tokens} tokens (the shortest has {shortest}); raise it"
            )
        self._rows = kept
        self._texts = [texts[i] for i in kept]
        self.prompts = IdRows([prompts[i] for i in kept])
        encoded = _encode([answers[i] for i in kept], _plain(renderer.tokenizer))
        self.answers = IdRows([[*ids, eos_token_id] for ids in encoded])

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> PromptRow:
        """Row ``index`` of those that were kept, 0 <= index < len."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        data = dict(self._table.rows[self._rows[index]])
        return PromptRow(
            prompt_ids=self.prompts[index],
            prompt_text=self._texts[index],
            answer_ids=self.answers[index],
            answer=data[self._answer_column],
            row=data,
        )

    def where(self, index: int) -> str:
        """``file:line`` of row ``index`` of those that were kept."""
        return self._table.where(self._rows[index])


def load_dataset(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, path: str | Path
) -> PromptDataset:
    """Read and tokenise ``path`` as the recipe's ``data`` section says.

    Raises:
        ValueError: faults in the file or the settings, with file and line, or no prompt left.
    """
    eos_token_id = tokenizer.eos_token_id
    if not isinstance(eos_token_id, int):
        raise ValueError(
            "the tokenizer has no end-of-sequence token, so an answer could not end: "
            "set eos_token in the model folder's tokenizer_config.json"
        )
    table = read_table(path)
    _check_columns(table, settings)
    renderer = Renderer(tokenizer, settings)
    return PromptDataset(table, renderer, settings, eos_token_id)


def _check_columns(table: Table, settings: DataSettings) -> None:
    wanted = {"prompt_column": settings.prompt_column, "answer_column": settings.answer_column}
    faults = [
        f"{table.path}: there is no column '{column}' (data.{key}); {hint(column, table.columns)}"
        for key, column in wanted.items()
        if column not in table.columns
    ]
    raise_faults(table.path, faults)


def _texts(table: Table, renderer: Renderer, settings: DataSettings) -> tuple[list[str], list[str]]:
    """Every row's rendered prompt, and its answer as text."""
    texts, answers, faults = [], [], []
    for index, row in enumerate(table.rows):
        try:
            texts.append(renderer.text(_value(row, settings.prompt_column)))
            answers.append(_answer_text(_value(row, settings.answer_column)))
        except ValueError as error:
            faults.append(f"{table.where(index)}: {error}")
    raise_faults(table.path, faults)
    return texts, answers


def _value(row: dict[str, Any], column: str) -> Any:
    if column not in row:
        raise ValueError(f"the row has no '{column}'; {hint(column, row)}")
    return row[column]


def _answer_text(answer: Any) -> str:
    """An answer as a model would write it; null and nested values are none."""
    if not isinstance(answer, str | int | float):
        raise ValueError(f"the answer must be text or a number, not {answer!r}")
    return str(answer)


def _encode(texts: list[str], encode: Any) -> list[list[int]]:
    """Token ids of ``texts``, some at a time so that memory stays bounded."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), _ROWS_AT_ONCE):
        ids.extend(encode(texts[start : start + _ROWS_AT_ONCE]))
    return ids


def _plain(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Encoder of answers: they follow a prompt, so no special token is added."""
    return lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"]
