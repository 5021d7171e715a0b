"""A small parent for a server: it ends the server when whoever asked for it is gone.

`supervise.py PARENT_PID COMMAND...` starts the command in a session of its own and watches three
things: the command, its own parent, and the signals TERM, INT and HUP. Whichever comes first ends
the command's whole process group. PR_SET_PDEATHSIG alone would not do in the parent: it fires when
the *thread* that forked ends. Standard library only, so that it starts at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
_GRACE_SECONDS = 3.0
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(parent: int, command: list[str]) -> int:
    """Run `command` while `parent` lives; returns its exit status (128 + n after signal n)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_in_child)
    while child.poll() is None and os.getppid() == parent:
        received = signal.sigtimedwait(_WATCHED, 0.5)
        if received is not None and received.si_signo != signal.SIGCHLD:
            break
    _end(child)
    status = child.wait()
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


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # every member has ended


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
