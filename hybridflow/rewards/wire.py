"""Messages between a worker and its scoring process: length, then body.

Bodies to the process are pickles that this program made. Bodies from it, where users' code runs,
are JSON: nothing that it sends is ever unpickled.
"""

import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.rewards.items import RewardItem

_HEAD = struct.Struct(">Q")
LARGEST_BODY = 1 << 28
"""Bytes; a message from a scoring process that claims more is a fault."""


@dataclass(frozen=True)
class Load:
    """The first message to a process: which reward it is for."""

    name: str
    parameters: dict[str, Any]
    base: Path


@dataclass(frozen=True)
class Work:
    """Each further message: items to score, and the deadline of each call in seconds."""

    items: list[RewardItem]
    seconds: float


def send_body(connection: socket.socket, body: bytes) -> None:
    """Write one message whole."""
    connection.sendall(_HEAD.pack(len(body)))
    connection.sendall(body)


def read_body(connection: socket.socket) -> bytes | None:
    """The next message, waited for; None when the other side has closed."""
    head = _exactly(connection, _HEAD.size)
    return None if head is None else _exactly(connection, _HEAD.unpack(head)[0])


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
