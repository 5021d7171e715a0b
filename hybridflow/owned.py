"""Folders that belong to one process, and go with it: by its own hand, else by the next run's.

The owner holds a lock on a file inside for as long as it lives. The kernel lets the lock go at its
death, whatever that is, and asks for no process number, which two containers may give twice.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

SYNC_FOLDERS = "hybridflow-sync-"
"""Begins the names of those through which weights are published."""
LOCK = ".owner"
"""The locked file; it names the owner's machine and process."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_held: dict[Path, int] = {}


def make(parent: Path, prefix: str) -> Path:
    """A new folder in ``parent`` that only this user reads.

    Those of the same prefix whose owner is gone are removed first.
    """
    remove_abandoned(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    _claim(folder)
    atexit.register(_remove_at_exit, folder, os.getpid())
    return folder


def keep(folder: Path) -> None:
    """Make this process's folder, or its lock, anew where something else has removed it.

    Raises:
        ValueError: something else stands in its place.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_own(folder):
        raise ValueError(f"{folder} was removed, and something else stands there now.")
    if folder not in _held or not _is_at(folder / LOCK, _held[folder]):
        _let_go(folder)
        _claim(folder)


def remove(folder: Path) -> None:
    """Remove this process's folder; safe to call again."""
    shutil.rmtree(folder, ignore_errors=True)
    _let_go(folder)


def _remove_at_exit(folder: Path, owner: int) -> None:
    """What was not removed in order, after an error, say; a fork of the owner owns nothing."""
    if folder in _held and os.getpid() == owner:
        remove(folder)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove folders of this user and machine whose owner is gone.

    What has no lock, or stands on a file system without locks, is left alone.
    """
    for folder in parent.glob(f"{prefix}*"):
        # Its owner lives, or another run removes it at the same time.
        with contextlib.suppress(OSError):
            if _is_own(folder):
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        told = os.read(descriptor, 4096).decode(errors="replace").splitlines()
        if not _is_here(told):
            return  # a disk that machines share need not share their locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in folder.iterdir():
            if path.name == LOCK:
                continue  # last, so that whoever is killed here leaves a folder that is known
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def _is_here(told: list[str]) -> bool:
    """Whether a lock's text names this machine, by its present start or by its name."""
    return len(told) > 1 and (bool(told[0]) and told[0] == _boot() or told[1] == _host())


def _claim(folder: Path) -> None:
    """Put a locked file into ``folder``; nobody sees it unlocked."""
    aside = folder / f"{LOCK}-{os.getpid()}"
    descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # no locks here: nobody else will get this one either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(descriptor, f"{_boot()}\n{_host()}\n{os.getpid()}\n".encode())
    aside.rename(folder / LOCK)
    _held[folder] = descriptor


def _let_go(folder: Path) -> None:
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def _is_own(folder: Path) -> bool:
    """Whether it is a folder of this user's, and no link to one."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _host() -> str:
    return socket.gethostname()


def _boot() -> str:
    """Of this machine since its start; containers of one machine have the same."""
    return _BOOT.read_text().strip() if _BOOT.is_file() else ""
