"""From the rows of a table to token ids, for what a graph takes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.data.conversation import Turns, encode_completion, encode_turns
from hybridflow.data.messages import (
    ASSISTANT,
    SPOKEN,
    Message,
    kind,
    read_messages,
    trained_turns,
)
from hybridflow.data.readers import Table, raise_faults
from hybridflow.data.rendering import DataSettings, Renderer, as_messages
from hybridflow.recipe.names import hint

_ROWS_AT_ONCE = 1024
_MOST = 3.4e38  # of a float32
ANSWER, CHOSEN, REJECTED = "answer", "chosen", "rejected"


@dataclass
class Encoded:
    """Every row of a table.

    Attributes:
        texts: rendered prompts, for people.
        responses: ids by what they are: the answer (of a conversation all from its first trained
            token on), or the chosen and the rejected response.
        trained: of conversations, which ids of the answer are trained on.
        labels, margins: of the columns of these names.
    """

    texts: list[str]
    prompts: list[list[int]]
    responses: dict[str, list[list[int]]] = field(default_factory=dict)
    trained: list[list[bool]] | None = None
    labels: list[bool] | None = None
    margins: list[float] | None = None


def encode(
    table: Table, renderer: Renderer, settings: DataSettings, inputs: frozenset[str]
) -> Encoded:
    """What the graph inputs ``inputs`` (without ``eval_``) are made of.

    Raises:
        ValueError: faults of rows, with their places.
    """
    answered = bool(inputs & {"targets", "target_mask"})
    if "answers" in inputs or answered and settings.messages_column is None:
        each_row(table, lambda row: of_column(row, settings.answer_column, _text))
    if settings.messages_column is not None and "pairs" not in inputs:
        encoded = _conversations(table, renderer, settings)
    else:
        encoded = _prompts(table, renderer, settings, answered)
        if "pairs" in inputs:
            encoded.responses |= _pairs(table, renderer, settings)
    if "labels" in inputs:
        encoded.labels = each_row(table, lambda row: of_column(row, settings.label_column, _label))
    if "margins" in inputs:
        column = settings.margin_column
        encoded.margins = each_row(table, lambda row: of_column(row, column, _margin))
    return encoded


def each_row(table: Table, read: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """``read`` of every row; its ValueErrors together, each with the row's place."""
    values, faults = [], []
    for index, row in enumerate(table.rows):
        try:
            values.append(read(row))
        except ValueError as error:
            faults.append(f"{table.where(index)}: {error}")
    raise_faults(table.path, faults)
    return values


def _prompts(table: Table, renderer: Renderer, settings: DataSettings, answered: bool) -> Encoded:
    """Prompts and, where they are asked for, the answers as a model would write them."""

    def read(row: dict[str, Any]) -> tuple[str, str]:
        prompt = of_column(row, settings.prompt_column, renderer.text)
        return prompt, of_column(row, settings.answer_column, _text) if answered else ""

    rows = each_row(table, read)
    texts = [prompt for prompt, _ in rows]
    encoded = Encoded(texts, _in_bulk(texts, renderer.encode))
    if answered:
        answers = _in_bulk([answer for _, answer in rows], renderer.encode_answers)
        encoded.responses[ANSWER] = [[*ids, renderer.eos_token_id] for ids in answers]
    return encoded


def _conversations(table: Table, renderer: Renderer, settings: DataSettings) -> Encoded:
    """Conversations, cut before their first trained token into prompt and answer."""
    column = str(settings.messages_column)

    def read(value: Any) -> Turns:
        return encode_turns(renderer, value, settings.turns)

    turns = each_row(table, lambda row: of_column(row, column, read))
    prompts = [turn.ids[: turn.first] for turn in turns]
    return Encoded(
        texts=renderer.tokenizer.batch_decode(prompts, skip_special_tokens=False),
        prompts=prompts,
        responses={ANSWER: [turn.ids[turn.first :] for turn in turns]},
        trained=[turn.trained[turn.first :] for turn in turns],
    )


def _pairs(table: Table, renderer: Renderer, settings: DataSettings) -> dict[str, list[list[int]]]:
    """The chosen and the rejected response of every row."""
    columns = {CHOSEN: settings.chosen_column, REJECTED: settings.rejected_column}

    def read(row: dict[str, Any]) -> dict[str, list[int]]:
        prompt = value_of(row, settings.prompt_column)

        def response(value: Any) -> list[int]:
            message = _message(value, prompt)
            if renderer.chat:
                return encode_completion(renderer, prompt, message)
            if lost := [key for key in SPOKEN if message.get(key)]:
                raise ValueError(f"it has `{lost[0]}`, which needs a chat template; none is used")
            return [*renderer.encode_answers([message["content"]])[0], renderer.eos_token_id]

        return {name: of_column(row, column, response) for name, column in columns.items()}

    rows = each_row(table, read)
    return {name: [row[name] for row in rows] for name in columns}


def _message(value: Any, prompt: Any) -> Message:
    """A response: text, or messages of which the assistant's is the only new one."""
    if not isinstance(value, list):
        return {"role": ASSISTANT, "content": _text(value)}
    told = read_messages(value)
    before = read_messages(as_messages(prompt))
    new = told[len(before) :] if told[: len(before)] == before else told
    if len(new) != 1 or new[0]["role"] != ASSISTANT:
        roles = ", ".join(message["role"] for message in new)
        raise ValueError(
            "it must be text, or messages that end with one of the assistant's after those of the "
            f"prompt; it has {len(new)} more: {roles}"
        )
    if not trained_turns(value)[-1]:
        raise ValueError("the assistant's message has weight 0, and a pair is trained on")
    return new[0]


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """The row's value; ValueError when it has none."""
    if column not in row:
        raise ValueError(f"the row has no '{column}'; {hint(column, row)}")
    return row[column]


def of_column(row: Mapping[str, Any], column: str, read: Callable[[Any], Any]) -> Any:
    """``read`` of the row's value; its ValueError with the column's name."""
    value = value_of(row, column)
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"column '{column}': {error}") from error


def _text(value: Any) -> str:
    """An answer as a model would write it; null, nested values and no numbers are none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, str) and not (is_number and math.isfinite(value)):
        raise ValueError(f"it must be text or a number, not {kind(value)}")
    return str(value)


def _label(value: Any) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in ("true", "false", "0", "1"):
        return value.strip().lower() in ("true", "1")
    raise ValueError(f"it must be true or false, not {kind(value)}")


def _margin(value: Any) -> float:
    """By how much the chosen response is better: a number from 0 on that float32 holds."""
    try:
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not 0 <= margin <= _MOST:
        raise ValueError(f"it must be a number of 0 or more, not {kind(value)}")
    return margin


def _in_bulk(texts: list[str], encode_texts: Callable[[list[str]], Any]) -> list[list[int]]:
    """Token ids of ``texts``, some at a time so that memory stays bounded."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), _ROWS_AT_ONCE):
        ids.extend(encode_texts(texts[start : start + _ROWS_AT_ONCE]))
    return ids
