"""Reward 1 when the response's mathematical expression equals the answer's."""

import logging
import re
from functools import cache, lru_cache

from hybridflow.rewards.tags import within

_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
_BOXED = "\\boxed{"
_IN_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*")


def math_match(
    prompt: str, response: str, answer: object, row: dict, *, tag: str | None = None
) -> float:
    """1.0 when math-verify finds the last expression of ``response`` equal to ``answer``.

    Numbers, fractions, LaTeX, sets, intervals, equations; ``\\boxed{}`` goes before the rest of the
    response. math-verify's own time limits are off: the sample's deadline holds instead, so that
    what takes too long is counted.

    An answer of words or of one letter (a choice) is compared as text, in any case, with what the
    last ``\\boxed{}`` holds, or with the whole response: as products of letters "seat" would be
    "east".

    Args:
        tag: look only into the last ``<tag>...</tag>`` (nothing there scores 0); None: everywhere.

    Raises:
        ValueError: the answer holds no expression.
    """
    import math_verify

    _quiet()
    candidate = response if tag is None else within(response, tag)
    if candidate is None:
        return 0.0
    wanted = _plain(str(answer))
    if _WORDS.fullmatch(wanted):
        same = _plain(_boxed(candidate)) == wanted
        if same or len(wanted) > 1:  # one letter may be a variable
            return float(same)
    expected = _expression(str(answer))
    found = math_verify.parse(candidate, parsing_timeout=None)  # type: ignore[arg-type]
    return 1.0 if math_verify.verify(expected, found, timeout_seconds=None) else 0.0


def _plain(text: str) -> str:
    """The text without marks of LaTeX, brackets and a full stop around it, in lower case."""
    text = _IN_TEXT.sub(r"\1", text).strip().removesuffix(".")
    return " ".join(text.strip("$()[] \t\n").split()).casefold()


def _boxed(response: str) -> str:
    """What the last whole ``\\boxed{}`` holds; the response where it has none."""
    start = response.rfind(_BOXED)
    if start < 0:
        return response
    depth = 0
    for place in range(start + len(_BOXED) - 1, len(response)):
        depth += {"{": 1, "}": -1}.get(response[place], 0)
        if depth == 0:
            return response[start + len(_BOXED) : place]
    return response


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
