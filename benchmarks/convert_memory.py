"""Seconds, and the most memory that a job's processes hold beyond what they held before it.

The sampler is a process of its own, so that a job may fork and is not slowed by a thread.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PERIOD = 0.02
_PROC = Path("/proc")
_COUNTED = ("RssAnon:", "RssShmem:")
"""Not the pages of mapped files, which the kernel drops when it needs room."""


@dataclass
class Measured:
    """What one run of a job took.

    Attributes:
        seconds: of the wall clock.
        peak_bytes: most anonymous and shared memory of all its processes at one time, beyond what
            each held at its start (a forked one: what its parent held).
    """

    seconds: float = 0.0
    peak_bytes: int = 0


@contextmanager
def measuring(root: int) -> Iterator[Measured]:
    """Measure what happens inside, in the process ``root`` and its descendants."""
    measured = Measured()
    command = [sys.executable, "-m", "benchmarks.convert_memory", str(root)]
    sampler = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert sampler.stdout is not None
    try:
        sampler.stdout.readline()  # it has looked once: the memory before the job
        start = time.perf_counter()
        yield measured
        measured.seconds = time.perf_counter() - start
    finally:
        answer, _ = sampler.communicate(timeout=60)
    measured.peak_bytes = json.loads(answer)


class Tree:
    """The memory of a process and its descendants."""

    def __init__(self, root: int, without: int) -> None:
        self._root = root
        self._seen = {without}  # a process is asked for its parent once: looking must cost little
        self._pids = {root}
        self._find()
        self._before = {pid: anonymous(pid) for pid in self._pids}
        self.peak = 0

    def look(self) -> None:
        """Note the memory of now."""
        self._find()
        inherited = self._before[self._root]
        beyond = (anonymous(p) - self._before.get(p, inherited) for p in self._pids)
        self.peak = max(self.peak, sum(max(grown, 0) for grown in beyond))

    def _find(self) -> None:
        """Add what was forked since; parents have smaller numbers, as a rule."""
        new = {int(p.name) for p in _PROC.iterdir() if p.name.isdigit()} - self._seen
        for pid in sorted(new):
            if _parent(pid) in self._pids:
                self._pids.add(pid)
        self._seen |= new


def anonymous(pid: int) -> int:
    """Anonymous and shared resident bytes; 0 of a process that has ended."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_COUNTED))


def _parent(pid: int) -> int:
    """0 of a process that has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(text[text.rindex(")") + 2 :].split()[1])


def main() -> None:
    """Sample until standard input ends, then tell the peak."""
    tree = Tree(int(sys.argv[1]), os.getpid())
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], PERIOD)[0]:
        tree.look()
    tree.look()
    print(json.dumps(tree.peak))


if __name__ == "__main__":
    main()
