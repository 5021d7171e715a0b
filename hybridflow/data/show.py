"""Showing a recipe's data: the first samples of each file, and how many there are how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridflow.data.dataset import PromptDataset, PromptRow, load_dataset
from hybridflow.data.stream import PromptStream
from hybridflow.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridflow.recipe.schema import Recipe

_MASKED, _TRAINED = "dim", "bold green"


def show_recipe(recipe: Recipe, rows: int, console: Console) -> None:
    """Print ``rows`` samples and a summary of each data file that the recipe names.

    The samples of the training file are those of the first step, in its order.

    Raises:
        ValueError: no tokenizer in the model's folder, or faults in a file.
    """
    tokenizer = load_tokenizer(recipe.model.path)
    for title, path in _files(recipe).items():
        dataset = load_dataset(recipe.data, tokenizer, path)
        stream = PromptStream(dataset, recipe.seed, recipe.data.shuffle and title != "evaluation")
        console.rule(f"{title}: {path}")
        console.print(summary(dataset, recipe.data.max_prompt_tokens), highlight=False)
        for number in range(min(rows, len(dataset))):
            console.print(sample(stream.next(1)[0], tokenizer, number))


def _files(recipe: Recipe) -> dict[str, str]:
    """Path of each data file by what it is for; a warm start's own file is one of them."""
    files = {"training": recipe.data.train}
    warm_start = recipe.warm_start
    if warm_start is not None and warm_start.train not in (None, recipe.data.train):
        files["warm start"] = warm_start.train
    if recipe.data.eval is not None:
        files["evaluation"] = recipe.data.eval
    return files


def summary(dataset: PromptDataset, max_prompt_tokens: int) -> str:
    """Counts and lengths of a dataset, in words."""
    lines = [f"{_count(dataset.total, 'row')}, {_count(len(dataset), 'prompt')} kept"]
    if dataset.dropped:
        lines[0] += (
            f", {dataset.dropped:,} left out: longer than data.max_prompt_tokens="
            f"{max_prompt_tokens}"
        )
    lines.append(f"prompts have {_lengths(dataset.prompts.lengths)}")
    lines.append(f"answers have {_lengths(dataset.answers.lengths)}, the end of sequence included")
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _lengths(lengths: np.ndarray) -> str:
    """A histogram in words: the extremes, the middle and the tail."""
    low, middle, tail, high = np.percentile(lengths, [0, 50, 90, 100], method="nearest")
    if low == high:
        return f"{low} tokens each"
    return f"{low} to {high} tokens (half have at most {middle}, nine in ten at most {tail})"


def sample(row: PromptRow, tokenizer: PreTrainedTokenizerBase, number: int) -> Table:
    """One sample: its text, its tokens with their ids, and which of them are trained on."""
    table = Table(title=f"sample {number}", title_justify="left", show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("prompt", Text(row.prompt_text))
    table.add_row("answer", Text(str(row.answer)))
    table.add_row("tokens", tokens(row, tokenizer))
    trained = len(row.answer_ids)
    table.add_row(
        "mask",
        Text.assemble(
            (f"0 for {len(row.prompt_ids)} prompt tokens", _MASKED),
            ", ",
            (f"1 for {trained} answer tokens", _TRAINED),
            " of a supervised step; in RL, 1 for every token of a response",
        ),
    )
    return table


def tokens(row: PromptRow, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Every token as ``piece/id``, the trained ones in another style."""
    text = Text()
    for ids, style in ((row.prompt_ids, _MASKED), (row.answer_ids, _TRAINED)):
        for token_id in ids:
            text.append(f"{_piece(tokenizer, token_id)}/{token_id} ", style=style)
    text.rstrip()
    return text


def _piece(tokenizer: Any, token_id: int) -> str:
    """A token's text with its blanks made visible."""
    piece = tokenizer.decode([token_id], skip_special_tokens=False)
    return repr(piece)[1:-1].replace(" ", "\N{OPEN BOX}")
