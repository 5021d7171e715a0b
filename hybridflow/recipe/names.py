"""Hints for names that a user got wrong."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to ``name``, or None when nothing is close."""
    names = {valid_name.casefold(): valid_name for valid_name in valid}
    matches = get_close_matches(str(name).casefold(), list(names), n=1, cutoff=0.5)
    return names[matches[0]] if matches else None


def hint(name: str, valid: Iterable[str]) -> str:
    """A sentence that names the nearest valid name, else all of them."""
    names = sorted(valid)
    close = nearest(name, names)
    if close is not None:
        return f"did you mean '{close}'?"
    return f"valid: {', '.join(names)}" if names else "there is no valid name"


def advice(name: str, valid: Iterable[str]) -> str:
    """``hint`` as a whole sentence, for another one to follow."""
    text = hint(name, valid)
    return text if text.endswith("?") else f"{text}."
