"""The folder of a run: what may become one. Nothing but an earlier run is ever moved aside."""

import os
from pathlib import Path

LOCK_FILE = "run.lock"
"""Held by the process that runs in the folder; stays behind as the mark of a run's folder."""

_MARKS = (LOCK_FILE, "metrics.jsonl")


def is_run_folder(path: Path) -> bool:
    """Whether a run wrote this folder."""
    return any((path / name).is_file() for name in _MARKS)


def output_problem(path: Path) -> tuple[str, str] | None:
    """Why ``path`` cannot be a run's folder and how to mend it, None when it can."""
    there = _nearest(path)
    if not there.is_dir():
        return f"{there} is no folder", "name a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"the folder {there} cannot be written", "name one that can"
    if there != path:
        return None
    if Path.cwd().is_relative_to(path.resolve()):
        return f"{path} is or holds the working directory", "name a folder within it, or elsewhere"
    if any(path.iterdir()) and not is_run_folder(path):
        what = f"the folder {path} holds something else than a run"
        return what, "name a folder that is new, empty or an earlier run's"
    return None


def _nearest(path: Path) -> Path:
    """The path itself or the closest parent that exists."""
    return next((p for p in (path, *path.parents) if p.exists()), Path("/"))
