"""Messages between a worker and its scoring process: length, then body.

With a batch goes the memory in which the process answers, see ``ledger``; the rest, failures among
it, is messages. Bodies to the process are pickles that this program made. Bodies from it, where
users' code runs, are JSON: nothing that it sends is ever unpickled.
"""

import signal
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.rewards.items import RewardItem

_HEAD = struct.Struct(">Q")
GRACE_SECONDS = 5.0
"""After a deadline that the other side of the connection keeps: when this side acts."""

STACK_SIGNAL = signal.SIGRTMAX
"""A scoring process that gets it writes its stack down and ends, whatever runs in it."""

LARGEST_BODY = 1 << 28
"""Bytes; a message from a scoring process that claims more is a fault."""


@dataclass(frozen=True)
class Load:
    """The first message to a process: which reward it is for.

    Attributes:
        source: of the file that ``name`` names, so that a process which takes the place of another
            one runs the same code; None where it names none, or the file cannot be read.
    """

    name: str
    parameters: dict[str, Any]
    base: Path
    source: bytes | None = None


@dataclass(frozen=True)
class Work:
    """Each further message, with a ledger's memory: items to score, and the deadline of each call
    in seconds."""

    items: list[RewardItem]
    seconds: float


def send_body(connection: socket.socket, body: bytes, memory: int | None = None) -> None:
    """Write one message whole, and hand over a file with it."""
    whole = _HEAD.pack(len(body)) + body
    if memory is None:
        connection.sendall(whole)
        return
    sent = socket.send_fds(connection, [whole], [memory])
    connection.sendall(memoryview(whole)[sent:])


def read_body(connection: socket.socket) -> tuple[bytes, int | None] | None:
    """The next message, waited for, and the file that came with it; None when the other side has
    closed."""
    first, files, _, _ = socket.recv_fds(connection, _HEAD.size, 1)
    rest = _exactly(connection, _HEAD.size - len(first)) if first else None
    body = None if rest is None else _exactly(connection, _HEAD.unpack(first + rest)[0])
    return None if body is None else (body, files[0] if files else None)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


class Incoming:
    """Cuts what arrives in pieces into bodies."""

    def __init__(self) -> None:
        self._held = bytearray()

    def add(self, piece: bytes) -> None:
        self._held += piece

    def next(self) -> bytes | None:
        """The next whole body, None while it is not there; ValueError when it is too large."""
        if len(self._held) < _HEAD.size:
            return None
        (size,) = _HEAD.unpack_from(self._held)
        if size > LARGEST_BODY:
            raise ValueError(f"a message of {size} bytes, more than {LARGEST_BODY}")
        end = _HEAD.size + size
        if len(self._held) < end:
            return None
        body = bytes(self._held[_HEAD.size : end])
        del self._held[:end]
        return body
