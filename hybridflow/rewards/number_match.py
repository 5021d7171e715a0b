"""Reward 1 when the last number of the response is the answer."""

import re
from decimal import Decimal

_NUMBER = re.compile(
    r"(?:[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?"
)
_MINUS = "\N{MINUS SIGN}"


def last_number(text: str) -> Decimal | None:
    """The last decimal number in ``text`` ("1,234.5" and "1e3" are one number), or None.

    A sign counts only where no digit or letter stands right before it: "7-3" ends in 3.
    """
    text = text.replace(_MINUS, "-")
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    number = last.group().replace(",", "")
    is_operator = last.start() > 0 and text[last.start() - 1].isalnum()
    return Decimal(number.lstrip("+-") if is_operator else number)


def number_match(
    prompt: str, response: str, answer: object, row: dict, *, tolerance: float = 0.0
) -> float:
    """1.0 when the last number of ``response`` equals that of ``answer``, else 0.0.

    "So it is 42." matches the answer "42", "#### 42" and 42.0.

    Args:
        tolerance: largest absolute difference that still counts as equal.

    Raises:
        ValueError: the answer holds no number.
    """
    expected = last_number(str(answer))
    if expected is None:
        raise ValueError(f"the answer {str(answer)!r} holds no number; use exact_match for texts")
    found = last_number(response)
    if found is None:
        return 0.0
    return 1.0 if abs(found - expected) <= Decimal(str(tolerance)) else 0.0
