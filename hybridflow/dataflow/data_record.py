"""What a run's data and its user's own code hold, kept in its folder.

A run that goes on must find the same data, and is warned of other code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.data import PromptDataset
from hybridflow.dataflow.feed import Feed
from hybridflow.dataflow.run_folder import RunFolder, write_aside
from hybridflow.recipe.own_code import OwnModule
from hybridflow.recipe.plan import Plan
from hybridflow.recipe.schema import Recipe

DATA_FILE = "data.json"
CODE = "code"
"""Key beside the stages: files of the recipe's ``imports``."""
_MEND = (
    "put the file back as it was, or start a new run on it, from the model that this one has "
    "trained: model.path=EXPORT output=DIR"
)


def data_record(plan: Plan, feeds: Mapping[str, Feed]) -> dict[str, dict[str, Any]]:
    """Of each stage's training rows, and of the held-out file: path, content and counts.

    ``sha256`` is of the content alone, whatever the file's name and times; ``tokens`` of what the
    tokenizer and its chat template made of the rows.
    """
    found = {name: _of_dataset(feed.stream.dataset) for name, feed in feeds.items()}
    if plan.recipe.evaluation is not None and plan.recipe.data.eval is not None:
        path = Path(plan.recipe.data.eval).expanduser()
        found["evaluation"] = {"path": str(path)}
    digests = {path: content_digest(Path(path)) for path in {one["path"] for one in found.values()}}
    whole = {name: one | {"sha256": digests[one["path"]]} for name, one in found.items()}
    return whole | {CODE: _own_code(plan.recipe)}


def _own_code(recipe: Recipe) -> dict[str, str]:
    """Digests of the files that the recipe imports. (Those of reward functions, which a reload may
    change, are in the checkpoints.)"""
    sources = {name: OwnModule.of(name).source for name in recipe.imports}
    return {n: hashlib.sha256(text).hexdigest() for n, text in sources.items() if text is not None}


def keep_data_record(folder: RunFolder, record: Mapping[str, Any]) -> None:
    """Write the record into a new run's folder."""
    write_aside(folder.path / DATA_FILE, json.dumps(record, indent=2))


def check_data_record(folder: RunFolder, record: Mapping[str, Any]) -> list[str]:
    """What to be warned of before a run goes on with the data of ``record``.

    Raises:
        ValueError: a file has other rows or another content than when the run began.
    """
    path = folder.path / DATA_FILE
    if not path.exists():
        return [f"{folder.path} has no {DATA_FILE}, so whether its data are the same is not known"]
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")).items())
        code = dict(before.pop(CODE, {}).items())
        shared = {name: (before[name], now) for name, now in record.items() if name in before}
        _ = [old["sha256"] for old, _ in shared.values()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove it to go on without "
            "knowing whether the data are the same"
        ) from error
    if faults := dict.fromkeys(text for pair in shared.values() for text in _faults(*pair)):
        raise ValueError(f"--resume: {'; '.join(faults)}; {_MEND}")
    coded = record.get(CODE, {})
    changed = [name for name, now in coded.items() if code.get(name, now) != now]
    return [
        f"the file of {name} has another content than when the run began" for name in changed
    ] + [
        f"the rows of {now['path']} give other tokens than when the run began: the tokenizer or "
        "its chat template has changed, or the template writes the date"
        for old, now in shared.values()
        if old.get("tokens") != now.get("tokens")
    ]


def _faults(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for key, noun in (("rows", "rows"), ("kept", "rows that fit")):
        if before.get(key) != now.get(key):
            yield f"{now['path']} has {now[key]} {noun}, and had {before[key]} when the run began"
            return
    if before["sha256"] != now["sha256"]:
        yield (
            f"{now['path']} has another content than when the run began (sha256 "
            f"{now['sha256'][:12]}, and it was {before['sha256'][:12]})"
        )


def _of_dataset(dataset: PromptDataset) -> dict[str, Any]:
    ids = hashlib.sha256()
    for rows in (dataset.prompts, *dataset.responses.values()):
        ids.update(rows.offsets.tobytes())
        ids.update(rows.values.tobytes())
    path = str(dataset.path)
    return {"path": path, "rows": dataset.total, "kept": len(dataset), "tokens": ids.hexdigest()}


def content_digest(path: Path) -> str:
    """Of a file's bytes, or of a dataset folder's Arrow files in the order of their names."""
    files = sorted(path.rglob("*.arrow")) if path.is_dir() else [path]
    whole = hashlib.sha256()
    for file in files:
        with open(file, "rb") as content:
            whole.update(hashlib.file_digest(content, "sha256").digest())
    return whole.hexdigest()
