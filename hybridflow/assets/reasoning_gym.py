"""Prompt files from the tasks of reasoning-gym, with what its scorers need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from hybridflow.assets.build import EXTRA_HINT, make, write_jsonl
from hybridflow.recipe.names import hint

DEFAULT_TASKS = ("chain_sum:max_terms=3,max_digits=1",)
"""Sums that a small model gets right now and then: what is never right teaches nothing."""


def make_reasoning_gym(
    folder: str | Path,
    *,
    tasks: Sequence[str] = DEFAULT_TASKS,
    rows: int = 1000,
    seed: int = 0,
) -> bool:
    """Write ``train.jsonl`` with ``rows`` rows and ``eval.jsonl`` with a tenth as many more.

    A row has ``prompt`` (the task's question), ``answer`` and the ``metadata`` by which the
    reward ``reasoning_gym`` scores it. Several tasks share the rows evenly, in turn; no prompt
    is in both files. A task is a name, or ``name:setting=value,...`` with the task's own settings.

    Returns:
        Whether anything had to be made.

    Raises:
        ValueError: an unknown task, one whose rows do not survive JSON, or too few rows.
    """
    if rows < 10:
        raise ValueError(f"rows={rows}: at least 10 are needed, a tenth of them for evaluation")
    if not tasks:
        raise ValueError("no task is named")
    names = [task.partition(":")[0] for task in tasks]
    options = {"asset": "reasoning_gym", "tasks": list(tasks), "rows": rows, "seed": seed}

    def build(target: Path) -> None:
        sources = [_task(task, 4 * (rows + rows // 10), seed) for task in tasks]
        drawn = _distinct_rows(names, sources, rows + rows // 10)
        write_jsonl(target / "train.jsonl", drawn[:rows])
        write_jsonl(target / "eval.jsonl", drawn[rows:])

    return make(Path(folder), options, build)


def _distinct_rows(
    tasks: Sequence[str], sources: Sequence[Any], count: int
) -> list[dict[str, Any]]:
    """``count`` rows with different prompts, the tasks taking turns."""
    rows: dict[str, dict[str, Any]] = {}
    for index in range(4 * count):
        for name, source in zip(tasks, sources, strict=True):
            row = _row(name, source, index)
            rows.setdefault(row["prompt"], row)
            if len(rows) == count:
                return list(rows.values())
    raise ValueError(
        f"{', '.join(tasks)}: only {len(rows)} different prompts in {4 * count * len(tasks)} "
        f"drawn, {count} are needed: ask for fewer rows or name more tasks"
    )


def _task(task: str, size: int, seed: int) -> Any:
    """The data set of ``name`` or ``name:setting=value,...``."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"reasoning-gym is not installed: {EXTRA_HINT}") from error
    name, _, text = task.partition(":")
    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no task '{name}'; {hint(name, DATASETS)}")
    settings = _settings(name, text, DATASETS[name][1])
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"reasoning-gym refuses '{task}': {error}") from error


def _settings(name: str, text: str, config_class: type) -> dict[str, Any]:
    """``setting=value,...`` as the task's keyword arguments; values are YAML."""
    known = {field.name for field in fields(config_class)} - {"size", "seed"}
    settings = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or key not in known:
            raise ValueError(
                f"task '{name}': '{pair}' is no setting=value of it; {hint(key, known)}"
            )
        settings[key] = yaml.safe_load(value)
    return settings


def _row(name: str, source: Any, index: int) -> dict[str, Any]:
    """The row of an entry; its own answer must score the same after a way through JSON."""
    entry = source[index]
    problem = f"reasoning-gym's task '{name}' cannot be kept in JSON"
    try:
        carried = json.loads(json.dumps(entry))
    except TypeError as error:
        raise ValueError(f"{problem}: {error}") from error
    before, after = (source.score_answer(entry["answer"], e) for e in (entry, carried))
    if before != after:
        raise ValueError(f"{problem}: its answer scores {before} before and {after} after")
    return {
        "prompt": carried["question"],
        "answer": carried["answer"],
        "metadata": carried["metadata"],
    }
