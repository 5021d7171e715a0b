"""What a reward may return: finite numbers that float32 holds, of the right count."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from hybridflow.recipe.schema_rewards import LARGEST_REWARD
from hybridflow.rewards.items import RewardItem

_SHOWN_CHARACTERS = 120


class InvalidResult(ValueError):
    """A reward returned something that is no reward: a mistake of its code."""


def checked(value: Any, item: RewardItem) -> float | list[float]:
    """The reward of ``item``: a number, or one for each of its tokens where it has ``tokens``.

    Raises:
        InvalidResult: not a number, not finite, beyond float32, or not one for each token.
    """
    if item.tokens is None:
        return _number(value, "")
    count = len(item.tokens)
    values = as_list(value)
    if values is None:
        raise InvalidResult(
            f"returned {shown(value)}, not a list of {count} numbers, one for each token "
            "(level: token); a reward of whole responses has level: sequence"
        )
    if len(values) != count:
        raise InvalidResult(
            f"returned {len(values)} values for {count} tokens; return one for each (the end of "
            "the sequence and other special tokens have none)"
        )
    return [_number(number, f" for token {place}") for place, number in enumerate(values)]


def as_list(value: Any) -> list[Any] | None:
    """A sequence, array or tensor of one axis as a list; None when ``value`` is none."""
    if isinstance(value, str | bytes | bytearray):
        return None
    if isinstance(value, Sequence):
        return list(value)
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape) == 1 and hasattr(value, "tolist"):
        return value.tolist()
    return None


def _number(value: Any, where: str) -> float:
    if not isinstance(value, Real):
        raise InvalidResult(
            f"returned {shown(value)}{where}, not a finite number; return a float in every case"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidResult(
            f"returned {shown(value)}{where}, not a finite number; return a float in every case"
        )
    if abs(number) > LARGEST_REWARD:
        raise InvalidResult(f"returned {shown(value)}{where}, beyond what float32 holds; scale it")
    return number


def shown(value: Any) -> str:
    """A value and its type in a message; never long, never an error."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's __repr__; the message must still be made
        text = f"an object whose repr raises {type(error).__name__}"
    if len(text) > _SHOWN_CHARACTERS:
        text = text[: _SHOWN_CHARACTERS - 3] + "..."
    return f"{text} ({type(value).__name__})"
