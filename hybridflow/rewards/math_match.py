"""Reward 1 when the response's mathematical expression equals the answer's."""

import logging
from functools import cache, lru_cache

from hybridflow.rewards.tags import within

_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def math_match(
    prompt: str, response: str, answer: object, row: dict, *, tag: str | None = None
) -> float:
    """1.0 when math-verify finds the last expression of ``response`` equal to ``answer``.

    Numbers, fractions, LaTeX, sets, intervals, equations; ``\\boxed{}`` goes before the rest of the
    response. math-verify's own time limits are off: the sample's deadline holds instead, so that
    what takes too long is counted.

    Args:
        tag: look only into the last ``<tag>...</tag>`` (nothing there scores 0); None: everywhere.

    Raises:
        ValueError: the answer holds no expression.
    """
    import math_verify

    _quiet()
    expected = _expression(str(answer))
    candidate = response if tag is None else within(response, tag)
    if candidate is None:
        return 0.0
    found = math_verify.parse(candidate, parsing_timeout=None)  # type: ignore[arg-type]
    return 1.0 if math_verify.verify(expected, found, timeout_seconds=None) else 0.0


@cache
def _quiet() -> None:
    """math-verify warns that its time limits are off, which is meant here."""
    for module in ("parser", "grader", "utils"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)


def load_math_verify() -> None:
    """Import math-verify and have it read its grammar, which takes seconds; ValueError where it is
    not installed."""
    try:
        math_match("", "$1$", "1", {})
    except ImportError as error:
        raise ValueError(f"the reward math needs math-verify: {error}") from error


@lru_cache(1024)
def _expression(answer: str) -> list:
    """The answer as an expression; as LaTeX where it does not say what it is."""
    import math_verify

    plain = not any(mark in answer for mark in _DELIMITERS)
    text = f"${answer.strip()}$" if plain else answer
    found = math_verify.parse(text, parsing_timeout=None)  # type: ignore[arg-type]
    if not found:
        raise ValueError(f"the answer {answer!r} holds no expression; use exact_match for texts")
    return found
