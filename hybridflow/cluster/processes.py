"""Finds and ends processes by a mark in their environment, which their children inherit.

So even a child whose parent has died, a rollout server say, is found.
"""

import time

import psutil

MARK = "HYBRIDFLOW_PROCESS_OF"
"""Environment variable of every worker: ``<session>/<role>``."""


def marked(mark: str) -> list[psutil.Process]:
    """This node's processes whose mark is ``mark`` or lies below it."""
    return [process for process in psutil.process_iter() if _mark_of(process).startswith(mark)]


def end_marked(mark: str, patience: float = 5.0) -> int:
    """Ends the processes of ``mark`` on this node: waits ``patience`` seconds for them to leave on
    their own, then kills until none is left. Returns how many had to be killed."""
    deadline = time.monotonic() + patience
    while (alive := marked(mark)) and time.monotonic() < deadline:
        psutil.wait_procs(alive, timeout=0.05)
    killed = 0
    deadline = time.monotonic() + 30.0
    while alive := marked(mark):
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in alive)
            raise TimeoutError(f"processes {pids} of {mark} are still there 30 s after SIGKILL")
        for process in alive:
            killed += _kill(process)
        psutil.wait_procs(alive, timeout=1.0)
    return killed


def _mark_of(process: psutil.Process) -> str:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return process.environ().get(MARK, "") + "/"
    except (psutil.Error, OSError):  # it has ended meanwhile, or belongs to someone else
        return ""


def _kill(process: psutil.Process) -> int:
    try:
        process.kill()  # psutil compares the start time first: a reused pid is left alone
    except psutil.NoSuchProcess:
        return 0
    return 1
