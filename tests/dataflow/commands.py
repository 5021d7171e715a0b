"""`hybridflow train` as a process of its own, watched from outside."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from hybridflow.cluster import processes

DEADLINE = 240.0
MARK = "HYBRIDFLOW_TEST_RUN"


class TrainCommand:
    """A run in a child process; ``left_over`` finds whatever it leaves behind."""

    def __init__(
        self,
        recipe: Path,
        *arguments: str,
        deadline: float = DEADLINE,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.deadline = deadline
        self.mark = uuid.uuid4().hex
        command = [
            *prefix,
            sys.executable,
            "-m",
            "hybridflow.cli",
            "train",
            str(recipe),
            *arguments,
        ]
        self.process = subprocess.Popen(
            command,
            env={**environment, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""

    def wait(self) -> int:
        """Exit code; a run that does not end within the deadline is a failure with its output."""
        try:
            self.output, _ = self.process.communicate(timeout=self.deadline)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"no end within {self.deadline:.0f} s:\n{self.output}") from None
        return self.process.returncode

    def wait_for(self, what: str, reached: Callable[[], bool]) -> None:
        """Poll until ``reached``; the run's end or the deadline is a failure."""
        deadline = time.monotonic() + DEADLINE
        while not reached():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"{what} was not seen:\n{self.output}")
            time.sleep(0.1)

    def processes(self, *parts: str) -> list[psutil.Process]:
        """This run's processes whose command line holds every one of ``parts``."""
        return [p for p in psutil.process_iter() if self._is_ours(p, parts)]

    def workers(self, role: str) -> list[psutil.Process]:
        """The Ray processes of a role's ranks, without what they have started."""
        found = []
        for process in self.processes("ray::"):
            with contextlib.suppress(psutil.Error):
                if f"/{role}" in process.environ().get(processes.MARK, ""):
                    found.append(process)
        return found

    def left_over(self, seconds: float = 60.0) -> list[str]:
        """Command lines of processes that are still there after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [" ".join(process.cmdline()) for process in found]

    def end(self) -> None:
        """Kill the run and all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.output, _ = self.process.communicate(timeout=DEADLINE)
        for process in self.processes():
            process.kill()

    def _is_ours(self, process: psutil.Process, parts: tuple[str, ...]) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            ours = process.environ().get(MARK) == self.mark
            line = " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            return False
        return ours and all(part in line for part in parts)
