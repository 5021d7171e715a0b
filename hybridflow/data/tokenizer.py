"""A model folder's tokenizer, or an error that says whose it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in ``path``; ValueError when none loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain ones
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"model.path: {path} has no tokenizer that loads: {reason}; restore its files"
        ) from error
