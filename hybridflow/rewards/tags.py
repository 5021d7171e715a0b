"""Text within tags of a response."""


def within(text: str, tag: str) -> str | None:
    """What stands between the last ``<tag>`` and the ``</tag>`` after it, or None."""
    _, opening, tail = text.rpartition(f"<{tag}>")
    inner, closing, _ = tail.partition(f"</{tag}>")
    return inner.strip() if opening and closing else None
