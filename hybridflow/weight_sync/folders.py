"""Folders of this host's memory that belong to one process of a run, and end with it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import psutil

PREFIX = "hybridflow-sync-"


def memory() -> Path:
    """A folder of this host's memory where there is one, else that of temporary files."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def own_folder(parent: str | Path) -> Path:
    """A new folder in ``parent`` that only this user reads, named after this process.

    Folders of this host's processes that are gone (killed, say) are removed first.

    Raises:
        ValueError: there is no folder ``parent``.
    """
    parent = Path(parent)
    if not parent.is_dir():
        raise ValueError(
            f"roles.rollout.sync.directory: there is no folder {parent}; name one that exists on "
            "every host"
        )
    host = socket.gethostname()
    remove_abandoned(parent, host)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{host}-{os.getpid()}-", dir=parent))


def remove_abandoned(parent: Path, host: str) -> None:
    """Remove this host's folders whose process is gone."""
    for folder in parent.glob(f"{PREFIX}{host}-*-*"):
        pid = folder.name.removeprefix(f"{PREFIX}{host}-").split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
