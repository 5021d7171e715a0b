"""Whose processes a benchmark takes for others'."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from benchmarks.convert_others import Others
from benchmarks.families import MARK

_SERVER = "import os, sys; os.read(int(sys.argv[1]), 1)"
"""Runs until the other end of a pipe closes."""
_PARENT = f"""
import sys
from subprocess import DEVNULL, Popen
server = [sys.executable, "-c", {_SERVER!r}, sys.argv[1]]
kept = [int(sys.argv[1])]
own = dict(start_new_session=True, pass_fds=kept, stdin=DEVNULL, stdout=DEVNULL)
print(Popen(server, **own).pid, flush=True)
sys.stdin.read()
"""
Serve = Callable[[dict[str, str]], tuple[subprocess.Popen, int]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a process that starts a server; gives it and the server's pid."""
    reading, writing = os.pipe()

    def start(environment: dict[str, str]) -> tuple[subprocess.Popen, int]:
        parent = subprocess.Popen(
            [sys.executable, "-c", _PARENT, str(reading)],
            env=environment,
            pass_fds=[reading],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert parent.stdout is not None
        return parent, int(parent.stdout.readline())

    yield start
    os.close(writing)
    os.close(reading)


def orphan(parent: subprocess.Popen, server: int) -> None:
    """The parent ends, and leaves its server to init."""
    parent.communicate(timeout=60)
    assert psutil.Process(server).ppid() not in (parent.pid, os.getpid())


def test_servers_that_outlive_their_parents(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MARK, "of-this-test")
    parent, stranger = serve({})
    orphan(parent, stranger)
    others = Others()
    parent, marked = serve(dict(os.environ))
    orphan(parent, marked)
    parent, seen = serve({})
    others.ticks()
    orphan(parent, seen)
    found = {pid for pid, _ in others.ticks()}
    assert stranger in found
    assert not {marked, seen, os.getpid()} & found
    assert others.cores() >= 0
