"""Reward 1 when the response has the wanted form."""

import re


def format_regex(prompt: str, response: str, answer: object, row: dict, *, pattern: str) -> float:
    """1.0 when ``pattern`` matches the whole response, else 0.0.

    White space around the response is ignored, and a dot also matches line breaks.

    Args:
        pattern: a Python regular expression, such as ``<think>.*</think>.*``.

    Raises:
        ValueError: the pattern is no regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
    return 1.0 if compiled.fullmatch(response.strip()) else 0.0
