"""The run's folder: the resolved recipe, checkpoints and where to resume."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hybridflow.megatron.checkpoint import MEND
from hybridflow.recipe.output import LOCK_FILE, output_problem

STATE_FILE = "state.json"
RECIPE_FILE = "recipe.yaml"
VERSION_FILE = "weight_version"
MAY_CHANGE = frozenset({"steps", "output", "evaluation", "checkpoint", "control", "export"})


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step; all that resuming needs beside the engine's state.

    Attributes:
        live: the live values, as ``SharedState.saved`` gives them; empty: as the recipe says.
        rewards: the parameters that reloads told, by reward role and function.
        code: digests of the reward files in force, by role and function.
        watch: what the warnings have counted in this stage.
        sources: values of the source column that have a metric, by that metric's name.
    """

    stage_index: int
    step: int
    global_step: int
    stream_position: int
    weight_version: int
    live: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    watch: dict[str, dict[str, int]] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: engine state under ``folder``, progress beside it."""

    folder: Path
    progress: Progress


class RunFolder:
    """``recipe.yaml``, ``checkpoints/``, ``export/`` and what the monitor writes.

    After a warm start also ``start_model/``, the policy that the next stage started from.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints_path = path / "checkpoints"
        self.export_path = path / "export"
        self.start_model_path = path / "start_model"

    def set_aside(self) -> None:
        """Keep an earlier run of the same name as ``<name>.1``, ``.2``, …

        ValueError when the folder is not a run's, or when the run goes on.
        """
        if problem := output_problem(self.path):
            raise ValueError(f"output: {problem[0]}; {problem[1]}")
        if self.path.exists() and any(self.path.iterdir()):
            with self.held():
                self.path.rename(_free_name(self.path))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder if need be, and be the one run in it; ValueError when there is another.

        The lock ends with the process, however that ends.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / LOCK_FILE, "a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"output: another run is going on in {self.path}; wait for its end, or name "
                    "another folder with output=DIR"
                ) from error
            yield

    def write_recipe(self, resolved_recipe: str) -> None:
        """Keep what is run, with every default and override."""
        write_aside(self.path / RECIPE_FILE, resolved_recipe)

    def checkpoints(self) -> list[Checkpoint]:
        """Whole checkpoints, oldest first; half-written ones have no state file."""
        found = []
        for state in self.checkpoints_path.glob(f"*/{STATE_FILE}"):
            if not state.parent.name.endswith(".partial"):
                found.append(Checkpoint(state.parent, _read_progress(state)))
        return sorted(found, key=lambda checkpoint: checkpoint.progress.global_step)

    def partial(self, progress: Progress) -> Path:
        """Where a checkpoint is written before it counts."""
        return self.checkpoints_path / f"step-{progress.global_step:06d}.partial"

    def begin_checkpoint(self, progress: Progress) -> Path:
        """The folder that the engine writes into; ``finish_checkpoint`` makes it count."""
        partial = self.partial(progress)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def finish_checkpoint(self, partial: Path, progress: Progress, keep: int) -> Path:
        """State file last, then the rename; then all but the ``keep`` newest go."""
        write_aside(partial / STATE_FILE, json.dumps(asdict(progress), indent=2))
        final = partial.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in self._whole()[:-keep]:
            half = old.with_name(old.name + ".partial")
            old.rename(half)  # a run that is killed within leaves no half one that counts
            shutil.rmtree(half, ignore_errors=True)  # what is left goes at the next resume
        return final

    def _whole(self) -> list[Path]:
        """Folders of whole checkpoints, oldest first, unread: a damaged one goes as others do."""
        found = [state.parent for state in self.checkpoints_path.glob(f"step-*/{STATE_FILE}")]
        steps = {p: p.name.removeprefix("step-") for p in found}
        return sorted((p for p in found if steps[p].isdecimal()), key=lambda p: int(steps[p]))

    def check_same_recipe(self, resolved_recipe: str) -> None:
        """ValueError when the run to resume was another one.

        What may change between the two: how long it runs, and what it evaluates and keeps.
        """
        before, now = self._kept_recipe(), yaml.safe_load(resolved_recipe)
        changed = [
            key
            for key in sorted(before.keys() | now.keys())
            if key not in MAY_CHANGE and before.get(key) != now.get(key)
        ]
        if changed:
            raise ValueError(
                f"--resume: the recipe differs from {self.path / RECIPE_FILE} in "
                f"{', '.join(changed)}; put these back, or start a new run with another output"
            )

    def _kept_recipe(self) -> dict[str, Any]:
        """What the run was begun with; ValueError when that cannot be told any more."""
        path = self.path / RECIPE_FILE
        try:
            recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
            reason = "it holds no recipe"
        except (OSError, ValueError, yaml.YAMLError) as error:
            recipe, reason = None, str(error).splitlines()[0]
        if not isinstance(recipe, dict):
            raise ValueError(
                f"--resume: {path} is damaged: {reason}; put back the recipe that the run was "
                "begun with (every default written out), or start a new run with another output"
            )
        return recipe

    def note_version(self, version: int) -> None:
        """Keep that weights are published under this number, before anyone sees them."""
        write_aside(self.path / VERSION_FILE, f"{version}\n")

    def noted_version(self) -> int:
        """The newest number that this run gave to weights; 0 when none is known.

        ValueError when the note is damaged.
        """
        path = self.path / VERSION_FILE
        if not path.exists():
            return 0
        text = path.read_text(encoding="utf-8").strip()
        if not (text.isascii() and text.isdecimal()):
            raise ValueError(
                f"{path} is damaged: it holds {text[:40]!r}, not the newest weight version; write "
                f"the greatest weights/version of {self.path / 'metrics.jsonl'} plus 1 into it"
            )
        return int(text)

    def remove_partial(self) -> None:
        """Clear what an ended run left half-written."""
        for partial in self.checkpoints_path.glob("*.partial"):
            shutil.rmtree(partial)


_MAPPINGS = ("live", "rewards", "code", "watch", "sources")


def _read_progress(path: Path) -> Progress:
    try:
        progress = Progress(**json.loads(path.read_text(encoding="utf-8")))
        numbers = {name: value for name, value in asdict(progress).items() if name not in _MAPPINGS}
        if not all(type(value) is int for value in numbers.values()):
            reason = "a value is no integer"
        elif below := [name for name, value in numbers.items() if value < 0]:
            reason = f"{below[0]} is below 0"
        elif wrong := [n for n in _MAPPINGS if not isinstance(getattr(progress, n), dict)]:
            reason = f"`{wrong[0]}` is no mapping"
        else:
            return progress
    except (ValueError, TypeError) as error:
        reason = str(error)
    raise ValueError(f"{path} is damaged: {reason}; {MEND}")


def write_aside(path: Path, text: str) -> None:
    """Write a file so that it is whole or absent."""
    aside = path.with_name(path.name + ".partial")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate
