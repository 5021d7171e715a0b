"""What enters the graph: prompts, answers and targets of the step's rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from hybridflow.batch import Ragged
from hybridflow.dataflow.fields import Value
from hybridflow.recipe.axes import Axis

if TYPE_CHECKING:
    from hybridflow.data import PromptRow, PromptStream

EVALUATION_PREFIX = "eval_"


class Feed:
    """Draws the training rows of a step, and holds the evaluation rows.

    The stream's position is all there is to resume from.
    """

    def __init__(self, stream: PromptStream, prompts: int, evaluation: list[PromptRow]) -> None:
        self.stream = stream
        self.prompts = prompts
        self.evaluation = evaluation

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
    return Value(Axis.PROMPTS, _COLUMNS[name](rows), prompts=len(rows))


def _ids(sequences: list[list[int]]) -> Ragged:
    return Ragged.from_rows(sequences, torch.int64)


def _answers(rows: list[PromptRow]) -> list[dict]:
    return [{**row.row, "answer": row.answer, "prompt_text": row.prompt_text} for row in rows]


_COLUMNS = {
    "prompts": lambda rows: _ids([row.prompt_ids for row in rows]),
    "targets": lambda rows: _ids([row.answer_ids for row in rows]),
    "answers": _answers,
}
