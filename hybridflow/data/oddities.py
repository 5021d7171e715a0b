"""Rows that can be trained on, and that nobody is likely to have meant."""

from __future__ import annotations

from pathlib import Path

from hybridflow.data.encode import CHOSEN, REJECTED, Encoded
from hybridflow.data.rendering import Renderer


def oddities(path: Path, encoded: Encoded, renderer: Renderer) -> list[str]:
    """What is odd about a file's rows, each with a count, for people.

    Raises:
        ValueError: every pair's two responses are the same, so that nothing could be learned.
    """
    return [
        *_equal_pairs(path, encoded),
        *_equal_labels(path, encoded),
        *_unknown(path, encoded, renderer),
        *_unread(path, renderer),
    ]


def _equal_pairs(path: Path, encoded: Encoded) -> list[str]:
    chosen, rejected = (encoded.responses.get(name, []) for name in (CHOSEN, REJECTED))
    equal = sum(one == other for one, other in zip(chosen, rejected, strict=True))
    if equal and equal == len(chosen):
        raise ValueError(
            f"{path}: the chosen and the rejected response of every row are the same; set "
            "data.chosen_column and data.rejected_column to the columns that hold them"
        )
    if not equal:
        return []
    return [
        f"{path}: the chosen and the rejected response of {equal} of {len(chosen)} rows are the "
        "same, which teaches nothing"
    ]


def _equal_labels(path: Path, encoded: Encoded) -> list[str]:
    kinds = set(encoded.labels or ())
    if len(kinds) != 1:
        return []
    kind = "desirable" if kinds.pop() else "undesirable"
    return [f"{path}: every row is labelled {kind}, so nothing tells good answers from bad ones"]


def _unknown(path: Path, encoded: Encoded, renderer: Renderer) -> list[str]:
    """Responses with text that the tokenizer does not know."""
    unknown = renderer.tokenizer.unk_token_id
    responses = [ids for rows in encoded.responses.values() for ids in rows]
    found = 0 if unknown is None else sum(unknown in ids for ids in responses)
    if not found:
        return []
    token = renderer.tokenizer.unk_token
    return [
        f"{path}: {found} of {len(responses)} responses hold text that the tokenizer does not "
        f"know, so the model learns to write {token}"
    ]


def _unread(path: Path, renderer: Renderer) -> list[str]:
    if not renderer.unread:
        return []
    keys = ", ".join(sorted(renderer.unread))
    return [f"{path}: the chat template does not read these keys of messages: {keys}"]
