"""Which of the machine's processes belong to a benchmark."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MARK = "HYBRIDFLOW_BENCHMARK"
"""A variable of a benchmark's processes, which all that they start inherit."""
INIT = 1
"""Reaps whom nobody waits for."""
KERNEL = 2
"""The parent of all kernel threads. They work for whoever reads and writes files."""

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")

Key = tuple[int, int]
"""Process id and start time: ids come again."""


@dataclass(frozen=True)
class Process:
    """Its parent's id, and the ticks that it and that its ended children have used."""

    parent: int
    ticks: int
    of_children: int


def processes() -> dict[Key, Process]:
    """Every process of the machine."""
    found = {}
    for pid in [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]:
        try:
            text = (PROC / str(pid) / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between the two reads
        fields = text[text.rindex(")") + 2 :].split()
        own, of_children = (sum(map(int, fields[at : at + 2])) for at in (11, 13))
        found[pid, int(fields[19])] = Process(int(fields[1]), own, of_children)
    return found


class Family:
    """This process and all that it started, also what has left it since.

    Members are found by the mark, for daemons leave their parents, and by their parent, for a
    process that sets its title loses its variables. Who was seen once stays a member.
    """

    def __init__(self, mark: str) -> None:
        self._mark = f"{MARK}={mark}".encode()
        self._known: set[Key] = set()

    def members(self, found: Mapping[Key, Process]) -> set[Key]:
        """Those of ``found`` that belong to it."""
        pids = {os.getpid()}
        for key in sorted(found, key=lambda key: key[1]):  # parents began before their children
            pid = key[0]
            if key in self._known or found[key].parent in pids or self._is_marked(pid):
                self._known.add(key)
                pids.add(pid)
        self._known &= set(found)
        return {key for key in found if key[0] in pids}

    def _is_marked(self, pid: int) -> bool:
        try:
            return self._mark in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            return False  # another user's, or it ended
