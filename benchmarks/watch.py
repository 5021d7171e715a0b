"""Runs a command and watches the machine: its memory, and whether others use the CPU."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.families import MARK, PROC, TICKS, Family, Key, processes

PERIOD = 1.0
QUIET_CORES = 0.1
"""Others may use this many cores in the mean, the system's own work included."""

_END_SECONDS = 30.0


@dataclass
class Watched:
    """What was seen while a command ran.

    Attributes:
        peak_bytes: most memory of all its processes at once; pages that several share count once.
        others: (time of the clock, cores that other processes used since the last look).
        load: load average of the last minute, before the command.
    """

    peak_bytes: int = 0
    others: list[tuple[float, float]] = field(default_factory=list)
    load: float = 0.0

    def other_cores(self, start: float, end: float) -> float:
        """Mean cores that others used between two times of the clock."""
        inside = [cores for at, cores in self.others if start <= at - PERIOD / 2 <= end]
        inside = inside or [cores for _, cores in self.others]
        return sum(inside) / len(inside) if inside else 0.0


class _Watcher(threading.Thread):
    """Looks at the machine once a ``PERIOD``."""

    def __init__(self, mark: str, watched: Watched) -> None:
        super().__init__(name="watch", daemon=True)
        self._family = Family(mark)
        self._watched = watched
        self._stop_asked = threading.Event()
        self._ticks: dict[Key, int] = {}
        self._busy = _busy_ticks()
        self._at = time.monotonic()

    def run(self) -> None:
        while not self._stop_asked.wait(PERIOD):
            self._look()

    def stop(self) -> None:
        """End the thread."""
        self._stop_asked.set()
        self.join()

    def _look(self) -> None:
        found = processes()
        ours = self._family.members(found)
        ticks = {key: found[key].ticks for key in ours}
        used = sum(ticks[key] - self._ticks.get(key, 0) for key in ours)
        busy, at = _busy_ticks(), time.monotonic()
        others = (busy - self._busy - used) / TICKS / (at - self._at)
        self._watched.others.append((time.time(), max(others, 0.0)))
        memory = sum(_memory(pid) for pid, _ in ours if pid != os.getpid())
        self._watched.peak_bytes = max(self._watched.peak_bytes, memory)
        self._ticks, self._busy, self._at = ticks, busy, at


def run_watched(
    command: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    log: Path,
    timeout: float,
) -> Watched:
    """Run a command to its end; its output goes to ``log``.

    Raises:
        RuntimeError: it failed or took more than ``timeout`` seconds; with the log's tail.
    """
    mark = secrets.token_hex(8)
    watched = Watched(load=os.getloadavg()[0])
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            cwd=cwd,
            env={**os.environ, **environment, MARK: mark},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    watcher = _Watcher(mark, watched)
    watcher.start()
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end(process)
        watcher.stop()
    if status != 0:
        why = f"took more than {timeout:.0f} s" if status is None else f"ended with {status}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{' '.join(command)} {why}. The end of {log}:\n{tail}")
    return watched


def _end(process: subprocess.Popen) -> None:
    """End the command and its process group, politely first."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, sign)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _busy_ticks() -> int:
    """Ticks of all cores that were not idle, those that a hypervisor took included."""
    values = (PROC / "stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _idle, _wait, hard, soft, steal = map(int, values)
    return user + nice + system + hard + soft + steal


def _memory(pid: int) -> int:
    """Proportional set size in bytes; 0 of a process that has ended."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
