"""What enters the graph: fields of the step's rows of data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybridflow.batch import Ragged
from hybridflow.dataflow.fields import Value
from hybridflow.recipe.catalogue import GRAPH_INPUTS

if TYPE_CHECKING:
    from hybridflow.data import PromptRow, PromptStream

EVALUATION_PREFIX = "eval_"


class Feed:
    """Draws the training rows of a step, and holds the evaluation rows.

    The stream's position is all there is to resume from. ``told`` says which rows of the files are
    not among them, and which are odd.
    """

    def __init__(
        self,
        stream: PromptStream,
        prompts: int,
        evaluation: list[PromptRow],
        told: Sequence[str] = (),
    ) -> None:
        self.stream = stream
        self.prompts = prompts
        self.evaluation = evaluation
        self.told = told

    def draw(self, inputs: Iterable[str]) -> dict[str, Value]:
        """The graph's ``inputs`` for one step, P rows each; advances the stream."""
        training = self.stream.next(self.prompts)
        values = {}
        for name in inputs:
            is_evaluation = name.startswith(EVALUATION_PREFIX)
            rows = self.evaluation if is_evaluation else training
            if rows:
                values[name] = _column(name.removeprefix(EVALUATION_PREFIX), rows)
        return values


def _column(name: str, rows: list[PromptRow]) -> Value:
    entry = GRAPH_INPUTS[name]
    return Value(entry.type.axis, _COLUMNS[name](rows), len(rows), entry.samples)


def _ids(sequences: list[list[int]]) -> Ragged:
    return Ragged.from_rows(sequences, torch.int64)


def _answers(rows: list[PromptRow]) -> list[dict]:
    return [{**row.row, "answer": row.answer, "prompt_text": row.prompt_text} for row in rows]


def _pairs(rows: list[PromptRow]) -> Ragged:
    return _ids([ids for row in rows for ids in (row.chosen_ids, row.rejected_ids)])


_COLUMNS: dict[str, Callable[[list[PromptRow]], Any]] = {
    "prompts": lambda rows: _ids([row.prompt_ids for row in rows]),
    "answers": _answers,
    "targets": lambda rows: _ids([row.answer_ids for row in rows]),
    "target_mask": lambda rows: Ragged.from_rows([row.answer_mask for row in rows], torch.bool),
    "pairs": _pairs,
    "labels": lambda rows: torch.tensor([row.label for row in rows], dtype=torch.bool),
    "margins": lambda rows: torch.tensor([row.margin for row in rows], dtype=torch.float32),
}
