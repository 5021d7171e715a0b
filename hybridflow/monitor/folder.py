"""What lies in a run folder, and the functions that read it back."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hybridflow.monitor.jsonl import Row, decode_numbers, lines_backwards, parse_line, read_rows

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
EVENTS = "events.jsonl"
TENSORBOARD = "tensorboard"
RECIPE = "recipe.yaml"
REPORT = "report.html"
CURVE = "reward_curve.png"

_NAME = re.compile(r"^name:\s*['\"]?([^'\"#\n]+)", re.MULTILINE)


def require_run_folder(folder: Path) -> None:
    """Raise ValueError, saying what is missing, unless ``folder`` holds a run."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a run folder: there is no such folder.")
    if not (folder / METRICS).is_file():
        raise ValueError(
            f"{folder} is not a run folder: it has no {METRICS}. "
            "Give the folder that `hybridflow train` wrote (its `output`)."
        )


def recipe_text(folder: Path) -> str | None:
    """The resolved recipe that the run saved, None when there is none."""
    path = folder / RECIPE
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def run_name(folder: Path) -> str:
    """The recipe's name, else the folder's."""
    found = _NAME.search(recipe_text(folder) or "")
    return found.group(1).strip() if found else folder.resolve().name


def read_metrics(folder: str | Path) -> list[Row]:
    """One row per step, in the order written.

    Keys: ``stage``, ``step``, ``time`` (Unix seconds), ``seconds`` (wall time of the step),
    ``metrics`` and ``node_seconds`` (name -> number; NaN and infinities are floats again).
    """
    rows = []
    for row in read_rows(Path(folder) / METRICS):
        for key in ("metrics", "node_seconds"):
            row[key] = decode_numbers(row.get(key, {}))
        rows.append(row)
    return rows


def read_events(folder: str | Path) -> list[Row]:
    """The run's events in order; keys ``time``, ``kind``, ``text`` and what the writer added."""
    return list(read_rows(Path(folder) / EVENTS))


def read_rollouts(folder: str | Path) -> Iterator[Row]:
    """Every rollout in order. Streams: the file of a long run does not fit in memory."""
    yield from map(_decode_rewards, read_rows(Path(folder) / ROLLOUTS))


def first_rollouts(folder: str | Path) -> list[Row]:
    """The rollouts of the first recorded step."""
    return _same_step(read_rollouts(folder))


def last_rollouts(folder: str | Path) -> list[Row]:
    """The rollouts of the last recorded step, read from the end of the file."""
    path = Path(folder) / ROLLOUTS
    if not path.exists():
        return []
    parsed = (parse_line(line, path, "near the end") for _, line in lines_backwards(path))
    rows = _same_step(_decode_rewards(row) for row in parsed if row is not None)
    return rows[::-1]


def _decode_rewards(row: Row) -> Row:
    """What may be no finite number; a response may well be the text NaN."""
    several = {"rewards": decode_numbers(row["rewards"])} if row.get("rewards") else {}
    return row | decode_numbers({key: row[key] for key in ("reward",) if key in row}) | several


def _same_step(rows: Iterable[Row]) -> list[Row]:
    """The leading rows that share the first one's stage and step."""
    found: list[Row] = []
    for row in rows:
        if found and _place(row) != _place(found[0]):
            break
        found.append(row)
    return found


def _place(row: Row) -> tuple[object, object]:
    return row.get("stage"), row.get("step")
