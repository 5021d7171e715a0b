"""A small parent for a server: it ends the server when whoever asked for it is gone.

`supervise.py PARENT_PID COMMAND...` starts the command in a session of its own and watches three
things: the command, its own parent, and the signals TERM, INT and HUP. Whichever comes first ends
the command's whole process group. PR_SET_PDEATHSIG alone would not do in the parent: it fires when
the *thread* that forked ends. Standard library only, so that it starts at once.

SGLang ends by SIGKILL and leaves its files in shared memory behind; those that the command's own
processes used are removed with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
_GRACE_SECONDS = 3.0
_SHARED = "/dev/shm/"
_LEFT_BEHIND = ("sgl_shm_", "sglang_loads_", "sem.mp-")
_LONGEST_LOOK = 60.0
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(parent: int, command: list[str]) -> int:
    """Run `command` while `parent` lives; returns its exit status (128 + n after signal n)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_in_child)
    files = _SharedFiles(child.pid)
    while child.poll() is None and os.getppid() == parent:
        files.look_at_times()
        received = signal.sigtimedwait(_WATCHED, 0.5)
        if received is not None and received.si_signo != signal.SIGCHLD:
            break
    files.look()
    _end(child)
    status = child.wait()
    files.remove()
    return status if status >= 0 else 128 - status


def _in_child() -> None:
    """In the command before it is executed: no blocked signals, and death with the supervisor."""
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end(child: subprocess.Popen) -> None:
    """End the command's process group: politely, then for good."""
    _signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(child.pid, signal.SIGKILL)


class _SharedFiles:
    """SGLang's files in shared memory that a process group has open or mapped.

    They are looked for at times, since a group that died tells no more.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self._found: set[str] = set()
        self._pause = 1.0
        self._next = time.monotonic() + self._pause

    def look_at_times(self) -> None:
        """Look after one second, and then ever less often."""
        if time.monotonic() >= self._next:
            self.look()
            self._pause = min(2 * self._pause, _LONGEST_LOOK)
            self._next = time.monotonic() + self._pause

    def look(self) -> None:
        """Note what the group uses now."""
        for process in _members(self._group):
            with contextlib.suppress(OSError):  # it has ended
                self._found |= {name for name in _open_files(process) if _is_left_behind(name)}

    def remove(self) -> None:
        """Remove what was noted; the group has ended."""
        for name in self._found:
            with contextlib.suppress(OSError):  # its owner did
                Path(name).unlink()


def _members(group: int) -> list[Path]:
    """The group's processes, by their folders of /proc."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # After the name, which may hold anything: state, parent, process group.
            stat = (process / "stat").read_text().rpartition(")")[2].split()
            if int(stat[2]) == group:
                found.append(process)
    return found


def _open_files(process: Path) -> set[str]:
    """Files that a process has mapped or open."""
    with (process / "maps").open() as maps:
        found = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if _SHARED in line}
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(descriptor.readlink()))
    return found


def _is_left_behind(name: str) -> bool:
    """Not a name that was removed already: its process sees it with " (deleted)"."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/" == _SHARED and file.startswith(_LEFT_BEHIND) and " " not in file


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # every member has ended


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
