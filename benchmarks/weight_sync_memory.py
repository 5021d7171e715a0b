"""Peak memory of a publication beside what its processes held before, each page counted once.

The sampler is a process of its own and looks every ``PERIOD``: anonymous memory of each process by
side, and what files in shared memory take, those without a name included.
"""

import json
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PERIOD = 0.005
_PROC = Path("/proc")
_SHARED = Path("/dev/shm")
_BLOCK = 512


@dataclass
class Peaks:
    """Bytes beyond those of the start.

    Attributes:
        total: most of all sides and files at one time.
        sides: most anonymous memory of each side.
        files: most that files in shared memory took.
    """

    total: int = 0
    sides: dict[str, int] = field(default_factory=dict)
    files: int = 0


@contextmanager
def watching(sides: Mapping[str, Sequence[int]], folders: Sequence[Path]) -> Iterator[Peaks]:
    """Watch processes by side and the files of folders while the block runs."""
    peaks = Peaks()
    asked = json.dumps({"sides": sides, "folders": [str(folder) for folder in folders]})
    sampler = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.weight_sync_memory", asked],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sampler.stdout is not None
    try:
        sampler.stdout.readline()  # it has looked once: the memory before
        yield peaks
    finally:
        answer, _ = sampler.communicate(timeout=60)
    found = json.loads(answer)
    peaks.total, peaks.sides, peaks.files = found["total"], found["sides"], found["files"]


def descendants(root: int) -> list[int]:
    """A process and all that descend from it now."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parent = int(text[text.rindex(")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


class _Sampler:
    def __init__(self, sides: dict[str, list[int]], folders: list[Path]) -> None:
        self._sides, self._folders = sides, folders
        self._device = _SHARED.stat().st_dev
        self._before, self._files_before = self._anonymous(), self._files()
        self.peaks = Peaks(sides=dict.fromkeys(sides, 0))

    def look(self) -> None:
        """Note the memory of now."""
        now = self._anonymous()
        grown = {side: max(now[side] - self._before[side], 0) for side in self._sides}
        files = max(self._files() - self._files_before, 0)
        peaks = self.peaks
        peaks.total = max(peaks.total, files + sum(grown.values()))
        peaks.files = max(peaks.files, files)
        for side, size in grown.items():
            peaks.sides[side] = max(peaks.sides[side], size)

    def _anonymous(self) -> dict[str, int]:
        return {side: sum(map(_anonymous, pids)) for side, pids in self._sides.items()}

    def _files(self) -> int:
        """Bytes of the folders' files and of the processes' open files without a name."""
        taken: dict[int, int] = {}
        paths = [path for folder in self._folders for path in folder.rglob("*")]
        for pids in self._sides.values():
            for pid in pids:
                paths += [*_open_files(pid), *_SHARED.glob(f"torch_{pid}_*")]
        for path in paths:
            try:
                found = path.stat()
            except OSError:
                continue  # it was removed or closed between the two calls
            inside = path.parts[1] != "proc" or found.st_nlink == 0
            if found.st_dev == self._device and inside:
                taken[found.st_ino] = found.st_blocks * _BLOCK
        return sum(taken.values())


def _open_files(pid: int) -> list[Path]:
    try:
        return list((_PROC / str(pid) / "fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []


def _anonymous(pid: int) -> int:
    """0 of a process that has ended."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    """Sample until standard input ends, then tell the peaks."""
    asked = json.loads(sys.argv[1])
    sampler = _Sampler(asked["sides"], [Path(folder) for folder in asked["folders"]])
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], PERIOD)[0]:
        sampler.look()
    sampler.look()
    peaks = sampler.peaks
    print(json.dumps({"total": peaks.total, "sides": peaks.sides, "files": peaks.files}))


if __name__ == "__main__":
    main()
