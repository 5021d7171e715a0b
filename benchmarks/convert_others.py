"""The CPU time of processes that do not belong to a benchmark."""

import os
import time
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_KERNEL = 2
"""The parent of all kernel threads. They work for whoever reads and writes files: not others."""
_INIT = 1
"""Reaps whom nobody waits for, a benchmark's servers among them: its ended children are no others.
"""


class Others:
    """Mean cores that others used while the object was watched.

    Everything that descends from this process is the benchmark's.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._before = _ticks()

    def cores(self) -> float:
        """Since the object was made."""
        now = _ticks()
        used = sum(max(ticks - self._before.get(key, 0), 0) for key, ticks in now.items())
        return used / _TICKS / max(time.monotonic() - self._start, 1e-9)


def _ticks() -> dict[tuple[int, int], int]:
    """CPU time of every other process and its ended children, by its id and start."""
    parents, ticks = {}, {}
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between the two reads
        fields = text[text.rindex(")") + 2 :].split()
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        with_children = 13 if pid == _INIT else 15
        ticks[pid, int(fields[19])] = sum(map(int, fields[11:with_children]))
    return {key: used for key, used in ticks.items() if not _is_ours(key[0], parents)}


def _is_ours(pid: int, parents: dict[int, int]) -> bool:
    while pid:
        if pid in (os.getpid(), _KERNEL):
            return True
        pid = parents.get(pid, 0)
    return False
