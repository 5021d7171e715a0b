"""The worker's side of a scoring process: starting it, talking to it, ending it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hybridflow.rewards.output import Output
from hybridflow.rewards.process_tree import descendants, memory_bytes
from hybridflow.rewards.wire import STACK_SIGNAL, Incoming, Load, Work, send_body

_LEAVE_SECONDS = 1.0
_KILL_SECONDS = 30.0
_STACK_BYTES = 8_000
_SHOWN_CALLS = 3
_KILLED = ", as the kernel does when memory runs out"
_OURS = str(Path(__file__).with_name("child.py"))


class ProcessEnded(Exception):
    """The process is gone, or talks nonsense and was ended; the text says which."""


class StillLoading(Exception):
    """The reward is not loaded yet, and may be: the process goes on."""


class ScoringProcess:
    """One process for one reward; loads it in the background.

    It inherits the environment; what it prints comes to this process's stderr, see ``Output``. It
    ends with ``end`` or when this process ends.
    """

    def __init__(self, load: Load, start_seconds: float, most_bytes: int) -> None:
        self._start_seconds = start_seconds
        self._most_bytes = most_bytes
        self._loaded_bytes = 0
        self._started = time.monotonic()
        ours, theirs = socket.socketpair()
        self._stack = os.memfd_create("reward-stack")
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
        numbers = (theirs.fileno(), self._stack)
        self._output = Output()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hybridflow.rewards.child", *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=self._output.fd,
                stderr=self._output.fd,
                pass_fds=numbers,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,
            )
        self._output.start()
        self._connection = ours
        self._watch = os.pidfd_open(self._process.pid)
        self._incoming = Incoming()
        self._end: tuple[int, str] | None = None
        self._said_ready = False
        self._seconds = 0.0
        self._pending = pickle.dumps(load)
        self.timed_out = False

    def wait_until_ready(self, seconds: float) -> str | None:
        """Why the reward cannot be used, or None once it can.

        Raises:
            StillLoading: ``seconds`` are over.
            ProcessEnded: it is gone, or it was not loaded within ``start_seconds`` of its start.
        """
        if self._said_ready:
            return None
        if self._pending:
            self._send(self._pending, seconds)
            self._pending = b""
        left = self._started + self._start_seconds - time.monotonic()
        message = self.receive(max(0.0, min(seconds, left)))
        if message is None and seconds < left:
            raise StillLoading
        if message is None:
            self.end()
            raise ProcessEnded(f"it was not loaded within {self._start_seconds:g} s")
        if message[0] == "fault":
            self.end()
            return str(message[1])
        if (text := self.too_large()) is not None:
            self.end()
            return f"it is too large: {text}"
        self._said_ready, self._loaded_bytes = True, memory_bytes(self._process.pid)
        return None

    def too_large(self) -> str | None:
        """What to tell where it and what it started hold more memory than they may."""
        held = memory_bytes(self._process.pid)
        if held <= self._most_bytes:
            return None
        told, most = _gib(held), _gib(self._most_bytes)
        return f"its process holds {told} of memory, more than {most} (`memory_gib`)"

    def leaks(self) -> str | None:
        """What to tell where half of the memory that it may take after loading is gone."""
        held = memory_bytes(self._process.pid)
        if not self._said_ready or held <= (self._loaded_bytes + self._most_bytes) / 2:
            return None
        return f"its process holds {_gib(held)} of memory, and {_gib(self._loaded_bytes)} at first"

    def send(self, work: Work, memory: int, seconds: float) -> None:
        """Hand over items to score, and the memory of their ledger."""
        self._output.renew()
        self._seconds = work.seconds
        self._send(pickle.dumps(work), seconds, memory)

    def _send(self, body: bytes, seconds: float, memory: int | None = None) -> None:
        self._connection.settimeout(max(seconds, 0.01))
        try:
            send_body(self._connection, body, memory)
        except OSError as error:
            raise ProcessEnded(self._cause()) from error
        self._connection.settimeout(None)

    def receive(self, seconds: float) -> list[Any] | None:
        """The next message, or None when none came in time."""
        deadline = time.monotonic() + seconds
        while (message := self._next()) is None:
            left = max(0.0, deadline - time.monotonic())
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            poll.register(self._watch, select.POLLIN)
            ready = dict(poll.poll(left * 1000))
            if self._connection.fileno() in ready:
                piece = self._read()
                if piece:
                    self._incoming.add(piece)
                    continue
                raise ProcessEnded(self._cause())
            if ready:
                raise ProcessEnded(self._cause())
            if not left:
                return None
        return message

    def _read(self) -> bytes:
        try:
            return self._connection.recv(1 << 20)
        except ConnectionError:
            return b""

    def _next(self) -> list[Any] | None:
        try:
            body = self._incoming.next()
            message = None if body is None else json.loads(body)
        except ValueError as error:
            self.end()
            raise ProcessEnded(f"its process wrote something else than messages: {error}") from None
        if message is not None and not _is_message(message):
            self.end()
            raise ProcessEnded("its process wrote something else than messages")
        return message

    def _cause(self) -> str:
        """How it ended; the stack where its own deadline did it, which holds when nothing here
        could end it in time."""
        code, stack = self._finish(patience=_LEAVE_SECONDS)
        if stack.startswith("Timeout"):
            self.timed_out = True
            return f"did not end within {self._seconds:g} s; it was at\n{_latest_calls(stack)}"
        if code < 0:
            killed = _KILLED if -code == signal.SIGKILL else ""
            return f"ended its process by {signal.Signals(-code).name}{killed}"
        return f"ended its process with exit code {code}"

    def stop(self) -> str:
        """End it at once; the innermost calls that it was at, empty where it cannot tell."""
        if self._end is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watch, STACK_SIGNAL)
        _, stack = self._finish(patience=_LEAVE_SECONDS)
        return _latest_calls(stack)

    def end(self) -> None:
        """End it and what it started. Safe to call again."""
        self._finish(patience=0.0)

    def _finish(self, patience: float) -> tuple[int, str]:
        """Its exit code (-N: by signal N) and the stack that it left; it gets ``patience``
        seconds to leave on its own."""
        if self._end is None:
            poll = select.poll()  # not select, which knows no descriptor over 1023
            poll.register(self._watch, select.POLLIN)
            poll.poll(patience * 1000)
            for descendant in descendants(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(descendant, signal.SIGKILL)
            # The group first: until its leader is waited for, no other process can get its id.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            try:
                code = self._process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:  # the kernel holds it; it is dead to us all the same
                code = -signal.SIGKILL
            stack = os.pread(self._stack, _STACK_BYTES, 0).decode(errors="replace")
            self._end = code, stack
            self._connection.close()
            self._output.close()
            os.close(self._stack)
            os.close(self._watch)
        return self._end


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


def _is_message(message: Any) -> bool:
    """Whether it is one of those that ``hybridflow.rewards.child`` sends."""
    match message:
        case ["ready" | "end"] | ["fault", str()]:
            return True
        case ["error" | "timeout" | "invalid", int(index), str()]:
            return index >= 0
    return False


def _latest_calls(stack: str) -> str:
    """The innermost calls of what faulthandler wrote, of the thread that was at work."""
    lines = [line.strip() for line in stack.splitlines() if line.startswith("  File")]
    users = itertools.takewhile(lambda line: _OURS not in line, lines)
    return "\n".join([*users][:_SHOWN_CALLS])
