"""The sync folder as a server's process sees it: the only files that it touches."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

SYNC_FOLDER = "HYBRIDFLOW_SYNC_FOLDER"
"""The environment variable that names the folder."""
LOADER = "hybridflow_loader.load"
"""The loader that a server with a sync folder knows, by the name that requests use."""
_SHOWN = 5


class LoadFault(ValueError):
    """Something that a request, its files or its sender got wrong; the text says what."""


def sync_folder() -> Path:
    """The folder that the server was started with."""
    named = os.environ.get(SYNC_FOLDER)
    if not named:
        raise LoadFault("the server was started without a sync folder; it takes no shards.")
    return Path(named).resolve(strict=True)


def open_inside(folder: Path, name: str, size: int) -> int:
    """A descriptor of the folder's file `name`, `size` bytes long; the caller closes it.

    Raises:
        LoadFault: when it is missing, of another size, a link, or another user's.
    """
    path = folder / file_name(name)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise LoadFault(f"{path} cannot be opened: {error.strerror}.") from error
    found = os.fstat(descriptor)
    faults = []
    if not stat.S_ISREG(found.st_mode):
        faults.append("it is no regular file")
    if found.st_uid != os.geteuid():
        faults.append(f"it belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_size != size:
        faults.append(f"it has {found.st_size} bytes, not {size}")
    if faults:
        os.close(descriptor)
        raise LoadFault(f"{path}: " + "; ".join(faults) + ".")
    return descriptor


def file_name(name: Any) -> str:
    """`name`, which is a plain file name: nothing that a request says leaves the folder."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}", name):
        raise LoadFault(f"{name!r} is no plain file name of the sync folder.")
    return name


def refuse(what: str, faults: list[str]) -> None:
    """LoadFault naming `what` and the first faults, if there are any."""
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise LoadFault(f"{what}: {'; '.join(faults[:_SHOWN])}{more}.")
