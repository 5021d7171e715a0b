"""The processes that a scoring process has started, and the memory of all together."""

from __future__ import annotations

import contextlib
from pathlib import Path

_HELD = ("RssAnon:", "RssShmem:")
"""Lines of ``/proc/PID/status`` in kB: what is of no file, so that it cannot be read again."""


def descendants(pid: int) -> list[int]:
    """Processes that it started, and those that they did, also in sessions of their own; not those
    whose parents are gone."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in map(int, path.read_text().split()):
                found += [*descendants(child), child]
    return found


def memory_bytes(pid: int) -> int:
    """Of a process and its descendants; what a fork shares with its parent counts twice."""
    return sum(map(_own_bytes, (pid, *descendants(pid))))


def _own_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(_HELD))
    return 0
