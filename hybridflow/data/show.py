"""Showing a recipe's data: the first samples of each file, and how many there are how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridflow.data.dataset import PromptDataset, PromptRow, load_dataset
from hybridflow.data.encode import ANSWER, CHOSEN, REJECTED
from hybridflow.data.rendering import DataSettings
from hybridflow.data.stream import PromptStream
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.recipe.compile import compile_recipe

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
    for title, (path, inputs) in _files(recipe).items():
        dataset = load_dataset(recipe.data, tokenizer, path, inputs)
        stream = PromptStream(dataset, recipe.seed, recipe.data.shuffle and title != "evaluation")
        console.rule(f"{title}: {path}")
        console.print(summary(dataset, recipe.data), highlight=False)
        for number in range(min(rows, len(dataset))):
            console.print(sample(stream.next(1)[0], tokenizer, number))


def _files(recipe: Recipe) -> dict[str, tuple[str, frozenset[str]]]:
    """Path of each data file by what it is for, and what the graphs take of its rows; a warm
    start's own file is one of them."""
    stages = compile_recipe(recipe).stages
    inputs = {stage.name: stage.rows_of("train") for stage in stages}
    files = {"training": (recipe.data.train, inputs["main"])}
    warm_start = recipe.warm_start
    if warm_start is not None and warm_start.train not in (None, recipe.data.train):
        files["warm start"] = warm_start.train, inputs["warm_start"]
    elif warm_start is not None:
        files["training"] = recipe.data.train, inputs["main"] | inputs["warm_start"]
    if recipe.data.eval is not None and (wanted := stages[-1].rows_of("eval")):
        files["evaluation"] = recipe.data.eval, wanted
    return files


def summary(dataset: PromptDataset, settings: DataSettings) -> str:
    """Counts and lengths of a dataset, in words."""
    lines = [f"{_count(dataset.total, 'row')}, {_count(len(dataset), 'prompt')} kept"]
    if dataset.dropped:
        bounds = [f"data.max_prompt_tokens={settings.max_prompt_tokens}"]
        if settings.max_tokens is not None:
            bounds.append(f"data.max_tokens={settings.max_tokens}")
        lines[0] += f", {dataset.dropped:,} left out: longer than {' or '.join(bounds)}"
    lines.append(f"prompts have {_lengths(dataset.prompts.lengths)}")
    for name, ids in dataset.responses.items():
        noun = "answers" if name == ANSWER else f"{name} responses"
        lines.append(f"{noun} have {_lengths(ids.lengths)}, the end of sequence included")
    return "\n".join([*lines, *dataset.oddities])


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
    if row.answer is not None:
        table.add_row("answer", Text(str(row.answer)))
    if row.label is not None:
        table.add_row("label", "desirable" if row.label else "undesirable")
    if row.margin is not None:
        table.add_row("margin", f"{row.margin:g}")
    table.add_row("tokens", tokens(row, tokenizer))
    for name, ids in ((CHOSEN, row.chosen_ids), (REJECTED, row.rejected_ids)):
        if ids:
            table.add_row(name, _tokens(ids, [True] * len(ids), tokenizer))
    table.add_row("mask", _mask(row))
    return table


def _mask(row: PromptRow) -> Text:
    trained = sum(row.answer_mask) + len(row.chosen_ids) + len(row.rejected_ids)
    noun = "answer" if row.answer_ids else "response"
    text = Text.assemble((f"0 for {len(row.prompt_ids)} prompt tokens", _MASKED))
    if untrained := len(row.answer_ids) - sum(row.answer_mask):
        text.append(f" and {untrained} tokens of others' turns", _MASKED)
    text.append(", ").append(f"1 for {trained} {noun} tokens", _TRAINED)
    if row.chosen_ids:
        return text.append(" of both responses")
    return text.append(" of a supervised step; in RL, 1 for every token of a response")


def tokens(row: PromptRow, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Every token of prompt and answer as ``piece/id``, the trained ones in another style."""
    ids = [*row.prompt_ids, *row.answer_ids]
    return _tokens(ids, [False] * len(row.prompt_ids) + row.answer_mask, tokenizer)


def _tokens(ids: list[int], trained: list[bool], tokenizer: PreTrainedTokenizerBase) -> Text:
    text = Text()
    for token_id, is_trained in zip(ids, trained, strict=True):
        piece = f"{_piece(tokenizer, token_id)}/{token_id} "
        text.append(piece, style=_TRAINED if is_trained else _MASKED)
    text.rstrip()
    return text


def _piece(tokenizer: Any, token_id: int) -> str:
    """A token's text with its blanks made visible."""
    piece = tokenizer.decode([token_id], skip_special_tokens=False)
    return repr(piece)[1:-1].replace(" ", "\N{OPEN BOX}")
