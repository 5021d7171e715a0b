"""From the rows of a table to token ids, for what a graph takes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridflow.data.conversation import encode_completion, encode_turns
from hybridflow.data.readers import Table, raise_faults
from hybridflow.data.rendering import DataSettings, Renderer, check_messages
from hybridflow.recipe.names import hint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_AT_ONCE = 1024
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
        each_row(table, lambda row: _answer(row, settings.answer_column))
    if settings.messages_column is not None and "pairs" not in inputs:
        encoded = _conversations(table, renderer, settings)
    else:
        encoded = _prompts(table, renderer, settings, answered)
        if "pairs" in inputs:
            encoded.responses |= _pairs(table, renderer, settings)
    if "labels" in inputs:
        encoded.labels = each_row(table, lambda row: _label(row, settings.label_column))
    if "margins" in inputs:
        encoded.margins = each_row(table, lambda row: _number(row, settings.margin_column))
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
        prompt = renderer.text(value_of(row, settings.prompt_column))
        return prompt, _answer(row, settings.answer_column) if answered else ""

    rows = each_row(table, read)
    texts = [prompt for prompt, _ in rows]
    encoded = Encoded(texts, _in_bulk(texts, renderer.encode))
    if answered:
        answers = _in_bulk([answer for _, answer in rows], _plain(renderer.tokenizer))
        encoded.responses[ANSWER] = [[*ids, renderer.eos_token_id] for ids in answers]
    return encoded


def _conversations(table: Table, renderer: Renderer, settings: DataSettings) -> Encoded:
    """Conversations, cut before their first trained token into prompt and answer."""
    column = str(settings.messages_column)
    turns = each_row(
        table, lambda row: encode_turns(renderer, value_of(row, column), settings.turns)
    )
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
    plain = _plain(renderer.tokenizer)

    def response(row: dict[str, Any], column: str) -> list[int]:
        prompt = value_of(row, settings.prompt_column)
        text = _message(value_of(row, column), prompt, column)
        if renderer.chat:
            return encode_completion(renderer, prompt, text)
        return [*plain([text])[0], renderer.eos_token_id]

    def read(row: dict[str, Any]) -> dict[str, list[int]]:
        return {name: response(row, column) for name, column in columns.items()}

    rows = each_row(table, read)
    return {name: [row[name] for row in rows] for name in columns}


def _message(value: Any, prompt: Any, column: str) -> str:
    """The text of a response: text, or messages of which the assistant's is the only new one."""
    if isinstance(value, str):
        return value
    check_messages(value)
    before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    messages = [(message["role"], message["content"]) for message in value]
    told = [(message["role"], message["content"]) for message in before]
    new = messages[len(told) :] if messages[: len(told)] == told else messages
    if len(new) != 1 or new[0][0] != "assistant":
        raise ValueError(
            f"'{column}' must be text, or messages that end with one of the assistant's after "
            f"those of the prompt; it has {len(new)} more: {', '.join(role for role, _ in new)}"
        )
    return new[0][1]


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """The row's value; ValueError when it has none."""
    if column not in row:
        raise ValueError(f"the row has no '{column}'; {hint(column, row)}")
    return row[column]


def _answer(row: dict[str, Any], column: str) -> str:
    """An answer as a model would write it; null and nested values are none."""
    answer = value_of(row, column)
    if not isinstance(answer, str | int | float):
        raise ValueError(f"the answer must be text or a number, not {answer!r}")
    return str(answer)


def _label(row: dict[str, Any], column: str) -> bool:
    label = value_of(row, column)
    if isinstance(label, bool) or (type(label) is int and label in (0, 1)):
        return bool(label)
    if isinstance(label, str) and label.strip().lower() in ("true", "false", "0", "1"):
        return label.strip().lower() in ("true", "1")
    raise ValueError(f"'{column}' must be true or false, not {label!r}")


def _number(row: dict[str, Any], column: str) -> float:
    try:
        number = float(value_of(row, column))
    except TypeError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"'{column}' must be a number, not {row[column]!r}")
    return number


def _in_bulk(texts: list[str], encode_texts: Callable[[list[str]], Any]) -> list[list[int]]:
    """Token ids of ``texts``, some at a time so that memory stays bounded."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), _ROWS_AT_ONCE):
        ids.extend(encode_texts(texts[start : start + _ROWS_AT_ONCE]))
    return ids


def _plain(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], Any]:
    """Encoder of answers: they follow a prompt, so no special token is added."""
    return lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"]
