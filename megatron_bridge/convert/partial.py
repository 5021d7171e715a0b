"""The folder beside DST in which a conversion grows, and what `--resume` compares."""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from megatron_bridge.convert.journal import boot_id
from megatron_bridge.convert.kinds import is_checkpoint
from megatron_bridge.convert.signals import held

_LOCK_SECONDS = 60.0
_STAMP = "conversion.json"
_LOCK = "lock"
_INODE = "inode"
_STAMP_KINDS = {"options": dict, "files": dict, "units": str, "unit_bytes": int}

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
        self._old = self.folder / "old"
        self._lock: TextIO | None = None

    @property
    def exists(self) -> bool:
        """True when a conversion began here and did not end."""
        # Without a result it was put in place, and killed while it tidied up.
        return (self.folder / _STAMP).is_file() and self.result.is_dir()

    @property
    def ended(self) -> bool:
        """True when a conversion was put in place, and killed while it tidied up."""
        if not (self.folder / _STAMP).is_file() or not self.destination.is_dir():
            return False
        return self.stamp().get(_INODE) == self.destination.stat().st_ino

    def check_destination(self, overwrite: bool) -> None:
        """An existing result is never touched unasked, and nothing but a checkpoint at all.

        Raises:
            ValueError: when it is there and ``overwrite`` is not, or is what cannot be replaced.
        """
        if not os.path.lexists(self.destination):
            return
        if not self.destination.exists():
            raise ValueError(f"{self.destination} is a link to nothing; remove it")
        if not self.destination.is_dir():
            raise ValueError(f"{self.destination} is a file; DST is a folder to make")
        if not overwrite:
            raise ValueError(
                f"{self.destination} exists; choose another DST, or replace it with --overwrite"
            )
        if os.path.ismount(self.destination):
            raise ValueError(f"{self.destination} is a mount point; choose a folder in it as DST")
        if any(self.destination.iterdir()) and not is_checkpoint(self.destination):
            raise ValueError(
                f"{self.destination} is no checkpoint, and --overwrite replaces nothing else; "
                "choose another DST, or remove it yourself"
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
        deadline = time.monotonic() + _LOCK_SECONDS
        while not self._try_lock():
            # Workers of a parent that was killed need a moment to end.
            if _is_alive(self._holder()) or time.monotonic() > deadline:
                raise ValueError(
                    f"another conversion to {self.destination} is at work (it holds "
                    f"{self.folder / _LOCK}); wait for it, or end it"
                )
            time.sleep(0.1)
        if self._old.exists() and not os.path.lexists(self.destination):
            self._old.rename(self.destination)  # a kill came between the two renames

    def _try_lock(self) -> bool:
        path = self.folder / _LOCK
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("a+")
        except FileNotFoundError:
            return False  # another conversion that ended removed the folder just now
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it before may have removed it, and a third made a new one.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                file.write(json.dumps([os.getpid(), boot_id()]))
                file.flush()
                self._lock = file  # held to the end
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        file.close()
        return False

    def _holder(self) -> Any:
        """Process id and boot id of the conversion at work, as its lock says."""
        try:
            return json.loads((self.folder / _LOCK).read_text())
        except (OSError, ValueError):
            return None

    def begin(self) -> None:
        """Start anew with an empty result folder."""
        (self.folder / _STAMP).unlink(missing_ok=True)
        self._clear()
        self.result.mkdir()

    def commit_begin(self, stamp: Stamp) -> None:
        """The empty result is laid out: from here on a cut leaves what can be resumed."""
        aside = self.folder / f"{_STAMP}.new"
        with aside.open("w") as file:
            json.dump({**stamp, _INODE: self.result.stat().st_ino}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(self.folder / _STAMP)

    def stamp(self) -> Stamp:
        """What the conversion that is to be resumed was begun with.

        Raises:
            ValueError: when it is damaged.
        """
        path = self.folder / _STAMP
        try:
            content = json.loads(path.read_text())
            for key, kind in _STAMP_KINDS.items():
                if not isinstance(content[key], kind):
                    raise TypeError(key)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path} is damaged: remove {self.folder} and start anew without --resume"
            ) from error
        return content

    def put_in_place(self, overwrite: bool) -> None:
        """The result is whole: rename it to DST; an old one steps aside first and goes last.

        Raises:
            ValueError: when DST came into being meanwhile and ``overwrite`` is not given.
        """
        with held():
            self.check_destination(overwrite)
            if self.destination.exists():
                shutil.rmtree(self._old, ignore_errors=True)
                self.destination.rename(self._old)
            self.result.rename(self.destination)
        _sync_folder(self.destination.parent)
        self.discard()

    def discard_if_empty(self) -> None:
        """Leave no trace of a conversion that ended before it began."""
        if self._lock is not None and self.folder.is_dir() and not self.exists:
            self.discard()

    def discard(self) -> None:
        """Remove the folder; the lock goes last, and another may hold a new one right after."""
        assert self._lock is not None
        self._clear(but=(_LOCK, _STAMP))  # while the stamp is there, `ended` tells what happened
        self._clear()
        (self.folder / _LOCK).unlink(missing_ok=True)
        self._lock.close()
        self._lock = None
        with contextlib.suppress(OSError):  # another conversion is in it already
            self.folder.rmdir()

    def _clear(self, but: tuple[str, ...] = (_LOCK,)) -> None:
        """Remove everything else."""
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in but:
                path.unlink()


def _is_alive(holder: Any) -> bool:
    """Whether the process that a lock names runs on this host."""
    match holder:
        case [int() as pid, str() as boot]:
            return boot == boot_id() and Path(f"/proc/{pid}").exists()
        case _:
            return False


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
