"""Which tokens of a conversation are the assistant's, told by the tokenizer's own template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hybridflow.data.rendering import Renderer

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MEND = (
    "set data.turns to last, or give the template {% generation %} marks around what the "
    "assistant writes"
)


@dataclass(frozen=True)
class Turns:
    """A conversation as token ids, cut behind the last token that is trained on.

    ``trained`` tells for each id whether the assistant wrote it.
    """

    ids: list[int]
    trained: list[bool]

    @property
    def first(self) -> int:
        """Place of the first trained token."""
        return self.trained.index(True)


def encode_turns(renderer: Renderer, messages: Any, turns: Literal["all", "last"]) -> Turns:
    """Token ids of ``messages`` and which of them a supervised step trains on.

    A template with ``{% generation %}`` marks tells by itself. Any other is asked by rendering the
    conversation up to each turn: what the assistant wrote is what a turn adds to the rendering that
    ends where the turn begins. A turn is trained on up to the token that ends it.

    Raises:
        ValueError: no turn of the assistant, or a template from which the turns cannot be told:
            one that renders a turn otherwise when another follows, or that ends none.
    """
    messages = renderer.conversation(messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("the conversation has no message of the assistant to train on")
    if _GENERATION.search(renderer.template):
        found = _marked(renderer, messages)
    else:
        found = _by_prefix(renderer, messages, turns)
    return _cut(found, turns)


def encode_completion(renderer: Renderer, prompt: Any, message: str) -> list[int]:
    """Token ids of the assistant's ``message`` after ``prompt``, the token that ends it included.

    Raises:
        ValueError: as ``encode_turns``.
    """
    messages = renderer.messages(prompt)
    answered = [*messages, {"role": "assistant", "content": message}]
    before, through = renderer.render(messages, True), renderer.render(answered, False)
    if not through.startswith(before):
        raise ValueError(
            "the chat template renders the prompt otherwise once it is answered, so the answer's "
            "tokens cannot be told; use data.chat: false with texts that are rendered already"
        )
    ids = renderer.encode([through[len(before) :]])[0]
    length = _end(ids, renderer)
    return ids[:length] if length else [*ids, renderer.eos_token_id]


def _marked(renderer: Renderer, messages: list[dict[str, str]]) -> Turns:
    """By the template's own marks."""
    rendered: Any = renderer.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    trained = [bool(mark) for mark in rendered["assistant_masks"]]
    runs = sum(trained[:1]) + sum(now and not before for before, now in pairwise(trained))
    wanted = sum(message["role"] == "assistant" for message in messages)
    if runs != wanted:
        raise ValueError(
            f"the {{% generation %}} marks of the chat template give {runs} spans of tokens for "
            f"{wanted} messages of the assistant; mend the template"
        )
    return Turns(list(rendered["input_ids"]), trained)


def _by_prefix(
    renderer: Renderer, messages: list[dict[str, str]], turns: Literal["all", "last"]
) -> Turns:
    """By rendering the conversation up to the beginning and up to the end of each turn."""
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    whole = renderer.render(messages, False)
    borders: list[int] = []  # in characters: where a turn begins, where it ends, ...
    for place in places if turns == "all" else places[-1:]:
        before = renderer.render(messages[:place], True)
        through = renderer.render(messages[: place + 1], False)
        if not (through.startswith(before) and whole.startswith(through)):
            raise ValueError(
                f"the chat template renders message {place} or what stands before it otherwise "
                f"when more follows, so the assistant's tokens cannot be told: {_MEND}"
            )
        borders += [len(before), len(through)]
    return _tokens(renderer, whole, borders)


def _tokens(renderer: Renderer, whole: str, borders: Sequence[int]) -> Turns:
    """Tokens of the pieces between borders, every second of which is trained on.

    Each piece is encoded by itself, as a prompt and what is sampled after it are.
    """
    edges = [0, *borders, len(whole)]
    pieces = [whole[start:stop] for start, stop in pairwise(edges)]
    ids: list[int] = []
    trained: list[bool] = []
    for place, piece in enumerate(renderer.encode(pieces)):
        end = _end(piece, renderer) if place % 2 else 0
        if place % 2 and not end:
            raise ValueError(
                "the chat template writes no special token after what the assistant says, so a "
                "model that learns from it could not end its turn; use another template"
            )
        ids += piece
        trained += [token < end for token in range(len(piece))]
    return Turns(ids, trained)


def _end(ids: list[int], renderer: Renderer) -> int:
    """Number of tokens up to and with the last special one; 0 when there is none.

    What a template writes behind it, such as a line break, the model never samples.
    """
    places = [place for place, token in enumerate(ids) if token in renderer.special_ids]
    return places[-1] + 1 if places else 0


def _cut(found: Turns, turns: Literal["all", "last"]) -> Turns:
    """Without what stands behind the last trained token; with ``last``, one run is left."""
    length = len(found.trained) - found.trained[::-1].index(True)
    ids, trained = found.ids[:length], found.trained[:length]
    if turns == "last":
        start = length - next(
            (n for n, mark in enumerate(reversed(trained)) if not mark), len(trained)
        )
        trained = [place >= start for place in range(length)]
    return Turns(ids, trained)
