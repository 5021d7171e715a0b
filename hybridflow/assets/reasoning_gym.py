"""Prompt files from the tasks of reasoning-gym, with what its scorers need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.assets.build import EXTRA_HINT, make, write_jsonl
from hybridflow.recipe.names import hint

DEFAULT_TASKS = ("chain_sum",)


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
    is in both files.

    Returns:
        Whether anything had to be made.

    Raises:
        ValueError: an unknown task, one whose rows do not survive JSON, or too few rows.
    """
    if rows < 10:
        raise ValueError(f"rows={rows}: at least 10 are needed, a tenth of them for evaluation")
    if not tasks:
        raise ValueError("no task is named")
    options = {"asset": "reasoning_gym", "tasks": list(tasks), "rows": rows, "seed": seed}

    def build(target: Path) -> None:
        drawn = _distinct_rows(tasks, rows + rows // 10, seed)
        write_jsonl(target / "train.jsonl", drawn[:rows])
        write_jsonl(target / "eval.jsonl", drawn[rows:])

    return make(Path(folder), options, build)


def _distinct_rows(tasks: Sequence[str], count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` rows with different prompts, the tasks taking turns."""
    sources = [_task(name, 4 * count, seed) for name in tasks]
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


def _task(name: str, size: int, seed: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"reasoning-gym is not installed: {EXTRA_HINT}") from error
    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no task '{name}'; {hint(name, DATASETS)}")
    return reasoning_gym.create_dataset(name, size=size, seed=seed)


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
