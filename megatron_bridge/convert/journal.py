"""Which units are done and where they lie: what `--resume` reads.

One file a rank, lines of JSON. A killed process loses nothing that it had written, so as long as
the host stays up every line counts. A host that loses power forgets what was not yet on the disk:
workers sync their files now and then and the journal notes that and is synced after them; of an
earlier boot only what comes before such a note counts.
"""

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Place = Any
"""Where a unit lies, as its writer says: JSON."""


def boot_id() -> str:
    """What changes when this host starts anew."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Journal:
    """The journal that this process writes."""

    def __init__(self, path: Path, run: int) -> None:
        self._file = path.open("ab", buffering=0)  # noqa: SIM115  (closed by close)
        _end_torn_line(path, self._file)
        self._add({"boot": boot_id(), "run": run})

    def done(self, worker: int, places: Iterable[tuple[int, Place]]) -> None:
        """Note finished units of a worker."""
        self._add({"worker": worker, "done": [list(place) for place in places]})

    def synced(self, worker: int) -> None:
        """Note that all earlier units of a worker outlive a loss of power."""
        self._add({"worker": worker, "synced": True})
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Bring the journal to the disk and close it."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _add(self, entry: Mapping[str, Any]) -> None:
        # One call a line, so that a kill tears at most the last one.
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        if self._file.write(line) != len(line):  # of a disk that fills up
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)


def _end_torn_line(path: Path, file: Any) -> None:
    """A kill may have torn the last line: what follows starts a new one."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        file.write(b"\n")


class _Reader:
    """Gathers the units of one journal that can be trusted."""

    def __init__(self, boots: set[str]) -> None:
        self.boots = boots
        self.done: dict[int, Place] = {}
        self.runs = 0
        self._boot = ""
        self._unsynced: dict[int, dict[int, Place]] = {}

    def read(self, path: Path) -> None:
        for line in path.read_bytes().split(b"\n"):
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # empty, or torn by a kill: its units are done again
            self._take(entry)
        self._end_of_run()

    def _take(self, entry: dict[str, Any]) -> None:
        if "boot" in entry:
            self._end_of_run()
            self._boot = entry["boot"]
            self.runs = max(self.runs, entry["run"] + 1)
        elif "done" in entry:
            held = self._unsynced.setdefault(entry["worker"], {})
            held.update((unit, place) for unit, place in entry["done"])
        else:
            self.done.update(self._unsynced.pop(entry["worker"], {}))

    def _end_of_run(self) -> None:
        if self._boot in self.boots:
            for units in self._unsynced.values():
                self.done.update(units)
        self._unsynced = {}


def read_journals(folder: Path, boots: set[str]) -> tuple[dict[int, Place], int]:
    """Units finished in earlier runs with their places, and the number of those runs.

    Args:
        folder: holds the journals of all hosts.
        boots: boot ids of the hosts that take part now.
    """
    reader = _Reader(boots)
    for path in sorted(folder.glob("journal.*.jsonl")):
        reader.read(path)
    return reader.done, reader.runs
