"""Chat messages as rows hold them: checked, and as a chat template takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
ASSISTANT = "assistant"
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of one thing, which transformers fills up from each other."""
SPOKEN = ("tool_calls", "function_call", *REASONING, "refusal", "audio")
"""Keys beside ``content`` that hold what a turn says: a template that drops one changes it."""
_WEIGHTS = ("weight", "train")


def read_messages(value: Any) -> list[Message]:
    """Messages with all their keys but those that say what is trained on.

    Content that is a list of texts becomes one text. A null key counts as one that is not there,
    as Parquet fills up what a message lacks.

    Raises:
        ValueError: ``value`` is no list of messages.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"it must be text or a list of messages, not {kind(value)}")
    return [_message(message, position) for position, message in enumerate(value)]


def trained_turns(messages: Sequence[Message]) -> list[bool]:
    """Of each message of the assistant, whether it is trained on: ``weight`` or ``train`` say so.

    Args:
        messages: as rows hold them, checked.

    Raises:
        ValueError: a weight other than 0 and 1, or one of what another role says.
    """
    found = []
    for position, message in enumerate(messages):
        weights = {key: message[key] for key in _WEIGHTS if message.get(key) is not None}
        for key, weight in weights.items():
            if weight not in (0, 1):
                raise ValueError(f"`{key}` of message {position} is 0 or 1, not {weight!r}")
        if message["role"] == ASSISTANT:
            found.append(all(weights.values()))
        elif any(weights.values()):
            raise ValueError(
                f"message {position}, of the {message['role']}, is marked as trained on; only "
                "what the assistant says is"
            )
    return found


def is_mute(message: Message) -> bool:
    """Whether a message says nothing, be it a blank content without a call of a tool."""
    content = message.get("content")
    return not (content and content.strip()) and not any(message.get(key) for key in SPOKEN)


def kind(value: Any) -> str:
    """What a value is, for messages."""
    if value is None:
        return "empty (null)"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return f"a {type(value).__name__}: {value!r}"[:80]


def _message(message: Any, position: int) -> Message:
    wanted = f"message {position} must be an object with texts `role` and `content`, not "
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{wanted}{message!r}")
    told = {k: value for k, value in message.items() if k not in _WEIGHTS and value is not None}
    content = told.get("content")
    if isinstance(content, list):
        content = told["content"] = "".join(_part(part, position) for part in content)
    if not isinstance(content, str) and (content is not None or is_mute(told)):
        raise ValueError(f"{wanted}{message!r}")
    return told


def _part(part: Any, position: int) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        what = part.get("type", part) if isinstance(part, Mapping) else part
        raise ValueError(
            f"message {position} has content that is no text ({what!r}), and models take text alone"
        )
    return part["text"]
