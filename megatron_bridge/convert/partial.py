"""The folder beside DST in which a conversion grows, and what `--resume` compares."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

_LOCK_SECONDS = 60.0
_STAMP = "conversion.json"
_LOCK = "lock"

Stamp = dict[str, Any]
"""What must be the same when a conversion is resumed: options, units and files of the source."""


def file_stamps(paths: Iterable[Path]) -> dict[str, list[int]]:
    """Size and time of change (ns) of each file, under its absolute path.

    Raises:
        ValueError: when one is gone.
    """
    try:
        stats = {str(path.resolve()): path.stat() for path in sorted(paths)}
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename}, a file of the source, is gone") from error
    return {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}


def changed_files(before: dict[str, list[int]], after: dict[str, list[int]]) -> list[str]:
    """The files that are not as they were."""
    return sorted(
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    )


class Partial:
    """``.DST.partial/`` beside DST.

    Attributes:
        destination: where the result goes at the end.
        result: the result as it grows.
        folder: the partial folder.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.folder = destination.with_name(f".{destination.name}.partial")
        self.result = self.folder / "result"
        self._lock: TextIO | None = None
        self._mine = False

    @property
    def exists(self) -> bool:
        """True when a conversion began here and did not end."""
        # Without a result it was put in place, and killed while it tidied up.
        return (self.folder / _STAMP).is_file() and self.result.is_dir()

    def check_destination(self, overwrite: bool) -> None:
        """An existing result is never touched unasked.

        Raises:
            ValueError: when it is there and ``overwrite`` is not.
        """
        if self.destination.exists() and not overwrite:
            raise ValueError(
                f"{self.destination} exists; choose another DST, or replace it with --overwrite"
            )

    def check_new(self) -> None:
        """A conversion that was cut short is neither continued nor deleted unasked.

        Raises:
            ValueError: when there is one.
        """
        if self.exists:
            raise ValueError(
                f"an earlier conversion to {self.destination} was cut short: continue it with "
                f"--resume, or remove {self.folder} to start anew"
            )

    def lock(self) -> None:
        """Keep other conversions away until this process and its workers are gone.

        Raises:
            ValueError: when another one is at work.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / _LOCK).open("w")  # noqa: SIM115  (held to the end)
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._mine = True
                return
            except BlockingIOError:
                # Workers of a parent that was killed need a moment to end.
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"another conversion to {self.destination} is at work (it holds "
                        f"{self.folder / _LOCK}); wait for it, or end it"
                    ) from None
                time.sleep(0.1)

    def begin(self) -> None:
        """Start anew with an empty result folder."""
        (self.folder / _STAMP).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()
        self.result.mkdir()

    def commit_begin(self, stamp: Stamp) -> None:
        """The empty result is laid out: from here on a cut leaves what can be resumed."""
        aside = self.folder / f"{_STAMP}.new"
        aside.write_text(json.dumps(stamp))
        aside.rename(self.folder / _STAMP)

    def stamp(self) -> Stamp:
        """What the conversion that is to be resumed was begun with."""
        return json.loads((self.folder / _STAMP).read_text())

    def put_in_place(self) -> None:
        """The result is whole: rename it to DST; an old one steps aside first and goes last."""
        old = self.folder / "old"
        if self.destination.exists():
            self.destination.rename(old)
        self.result.rename(self.destination)
        _sync_folder(self.destination.parent)
        shutil.rmtree(self.folder)

    def discard_if_empty(self) -> None:
        """Leave no trace of a conversion that ended before it began."""
        if self._mine and self.folder.is_dir() and not self.exists:
            shutil.rmtree(self.folder)


def check_resumable(now: Stamp, before: Stamp, folder: Path) -> None:
    """What was begun and what is asked for now must be one conversion.

    Raises:
        ValueError: naming every difference.
    """
    faults = [
        f"{name} was {before['options'].get(name)} and is {value}"
        for name, value in now["options"].items()
        if before["options"].get(name) != value
    ]
    changed = changed_files(before["files"], now["files"])
    faults += [f"{path} changed" for path in changed[:5]]
    if len(changed) > 5:
        faults.append(f"{len(changed) - 5} more files changed")
    if not faults and now["units"] != before["units"]:
        faults = ["this version of the bridge cuts the work in another way"]
    if faults:
        raise ValueError(
            f"the conversion in {folder} cannot be resumed: {'; '.join(faults)}. Restore this, or "
            f"remove {folder} and start anew without --resume"
        )


def sync_files(folder: Path) -> None:
    """Bring a folder's files and names to the disk."""
    for root, _, files in os.walk(folder):
        for file in files:
            descriptor = os.open(Path(root, file), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
