"""Which tokens of a conversation are the assistant's, told by the tokenizer's own template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from hybridflow.data.messages import ASSISTANT, Message, is_mute, trained_turns
from hybridflow.data.rendering import GENERATION, as_messages

if TYPE_CHECKING:
    from hybridflow.data.rendering import Renderer

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


def encode_turns(renderer: Renderer, value: Any, turns: Literal["all", "last"]) -> Turns:
    """Token ids of a conversation and which of them a supervised step trains on.

    A template with ``{% generation %}`` marks tells by itself. Any other is asked by rendering the
    conversation up to each turn: what the assistant wrote is what a turn adds to the rendering that
    ends where the turn begins. A turn is trained on up to the token that ends it; one with
    ``weight: 0`` (or ``train: false``) is not.

    Raises:
        ValueError: no turn of the assistant, or a template from which the turns cannot be told:
            one that renders a turn otherwise when another follows, or that ends none.
    """
    messages = renderer.conversation(value)
    trained = trained_turns(value)
    if not any(trained):
        raise ValueError("the conversation has no message of the assistant to train on")
    if turns == "last":
        if not trained[-1]:
            raise ValueError(
                "data.turns is last, and the last message of the assistant has weight 0: give it "
                "weight 1, or set data.turns to all"
            )
        trained = [False] * (len(trained) - 1) + [True]
    _check_spoken(messages[len(messages) - len(value) :], trained)
    if GENERATION.search(renderer.template):
        return _cut(_marked(renderer, messages, trained))
    return _cut(_by_prefix(renderer, messages, trained))


def _check_spoken(messages: list[Message], trained: list[bool]) -> None:
    places = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    for place, keep in zip(places, trained, strict=True):
        if keep and is_mute(messages[place]):
            raise ValueError(
                f"message {place}, of the assistant, is empty, so the model would learn to say "
                "nothing: give it a text or `weight: 0`, or remove the row"
            )


def encode_completion(renderer: Renderer, prompt: Any, message: Message) -> list[int]:
    """Token ids of the assistant's ``message`` after ``prompt``, the token that ends it included.

    Raises:
        ValueError: as ``encode_turns``.
    """
    before = renderer.render(renderer.messages(prompt), True)
    answered = renderer.conversation([*as_messages(prompt), message])
    through = renderer.render(answered, False)
    if not through.startswith(before):
        raise ValueError(
            "the chat template renders the prompt otherwise once it is answered, so the answer's "
            "tokens cannot be told; use data.chat: false with texts that are rendered already"
        )
    ids = renderer.encode([through[len(before) :]])[0]
    length = _end(ids, renderer)
    return ids[:length] if length else [*ids, renderer.eos_token_id]


def _marked(renderer: Renderer, messages: list[Message], trained: list[bool]) -> Turns:
    """By the template's own marks."""
    rendered = renderer.apply(
        messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )
    ids, marks = list(rendered["input_ids"]), [bool(mark) for mark in rendered["assistant_masks"]]
    edges = [place for place, (a, b) in enumerate(pairwise([False, *marks, False])) if a != b]
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    if len(runs) != len(trained):
        raise ValueError(
            f"the {{% generation %}} marks of the chat template give {len(runs)} spans of tokens "
            f"for {len(trained)} messages of the assistant; mend the template"
        )
    kept = [False] * len(ids)
    for (start, stop), keep in zip(runs, trained, strict=True):
        length = _marked_length(ids[start:stop], ids[stop : stop + 1], renderer) if keep else 0
        kept[start : start + length] = [True] * length
    return Turns(ids, kept)


def _marked_length(span: list[int], after: list[int], renderer: Renderer) -> int:
    """Tokens of a marked span that are trained on, up to and with the one that ends the turn."""
    if length := _end(span, renderer):
        return length
    if after == [renderer.eos_token_id]:
        return len(span) + 1
    raise ValueError(
        "the {% generation %} marks of the chat template leave out the token that ends a turn, so "
        "a model that learns from it could not end its turn; write {% endgeneration %} behind it"
    )


def _by_prefix(renderer: Renderer, messages: list[Message], trained: list[bool]) -> Turns:
    """By rendering the conversation up to the beginning and up to the end of each turn."""
    places = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    whole = renderer.render(messages, False)
    borders: list[int] = []  # in characters: where a turn begins, where it ends, ...
    for number, (place, keep) in enumerate(zip(places, trained, strict=True), start=1):
        if not keep:
            continue
        before = _before(renderer, messages, place, whole)
        through = renderer.render(messages[: place + 1], False)
        if not (through.startswith(before) and whole.startswith(through)):
            raise ValueError(
                f"the chat template renders answer {number} or what stands before it otherwise "
                f"when more follows, so the assistant's tokens cannot be told: {_MEND}"
            )
        borders += [len(before), len(through)]
    return _tokens(renderer, whole, borders)


def _before(renderer: Renderer, messages: list[Message], place: int, whole: str) -> str:
    """The rendering up to where the assistant's message ``place`` begins."""
    if place:
        return renderer.render(messages[:place], True)
    found = whole.find(renderer.opening) if renderer.opening else -1
    if found < 0:
        raise ValueError(
            "the conversation begins with the assistant, and the chat template does not tell where "
            "its words begin: begin with a message of the user, or with a system message"
        )
    return whole[: found + len(renderer.opening)]


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
    """Number of tokens up to and with the special one that ends a turn; 0 when none does.

    Blanks that a template writes behind it, such as a line break, the model never samples. Behind
    the last special token other text may stand only where that ends sequences: a mark such as the
    end of a thought ends no turn.
    """
    places = [place for place, token in enumerate(ids) if token in renderer.special_ids]
    if not places:
        return 0
    length = places[-1] + 1
    rest = str(renderer.tokenizer.decode(ids[length:], skip_special_tokens=True))
    ends = ids[length - 1] == renderer.eos_token_id or not rest.strip()
    return length if ends else 0


def _cut(found: Turns) -> Turns:
    """Without what stands behind the last trained token."""
    length = len(found.trained) - found.trained[::-1].index(True)
    return Turns(found.ids[:length], found.trained[:length])
