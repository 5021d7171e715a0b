"""Folders of this host's memory that belong to one process of a run, and end with it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hybridflow import owned

PREFIX = owned.SYNC_FOLDERS


def memory() -> Path:
    """A folder of this host's memory where there is one, else that of temporary files."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def own_folder(parent: str | Path) -> Path:
    """A new folder in ``parent`` of this process, which ``owned.remove`` removes.

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
    return owned.make(parent, PREFIX)
