"""The CPU time of processes that do not belong to a benchmark."""

from __future__ import annotations

import os
import secrets
import threading
import time

from benchmarks.families import INIT, KERNEL, MARK, TICKS, Family, Key, processes

PERIOD = 0.5
"""Seconds between two looks at who belongs to the benchmark."""


class Others:
    """Mean cores that others used while the object was watched.

    Everything that descends from this process is the benchmark's, also once its parent has ended
    and init has become its parent: servers that end are no others.
    """

    def __init__(self) -> None:
        self._family = Family(os.environ.setdefault(MARK, secrets.token_hex(8)))
        self._looking = threading.Lock()
        self._start = time.monotonic()
        self._before = self.ticks()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="others", daemon=True).start()

    def cores(self) -> float:
        """Since the object was made, which looks no further."""
        self._ended.set()
        used = sum(max(t - self._before.get(key, 0), 0) for key, t in self.ticks().items())
        return used / TICKS / max(time.monotonic() - self._start, 1e-9)

    def ticks(self) -> dict[Key, int]:
        """CPU time of every other process and its ended children (init's may have been ours)."""
        with self._looking:
            found = processes()
            ours = self._family.members(found)
        return {
            key: seen.ticks + (0 if key[0] == INIT else seen.of_children)
            for key, seen in found.items()
            if key not in ours and KERNEL not in (key[0], seen.parent)
        }

    def _watch(self) -> None:
        while not self._ended.wait(PERIOD):
            self.ticks()
