"""The control connection of a pair channel: deadlines, frames, and the proof of who is there."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass

_MAGIC = b"HFPAIR1\n"
_CHALLENGE = 32
_PROOF = 32
_FRAME = struct.Struct(">cQQ")
_LONGEST_TEXT = 4096
_HANDSHAKE_SECONDS = 5.0
_LAST_WORDS_SECONDS = 0.5

BUCKET, RECEIPT, CONSENT, FAILURE, KEY = b"B", b"R", b"C", b"F", b"K"
"""Kinds of frames: a bucket follows on the group; it was released; go on; why not; rendezvous."""


class PairError(RuntimeError):
    """A peer died, refused or went wrong. The channel is closed."""


class PairTimeout(PairError):
    """A wait reached its deadline. The channel is closed."""


class Deadline:
    """A moment `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, at least a millisecond."""
        return max(0.001, self._end - time.monotonic())

    def over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._end


@dataclass(frozen=True)
class Endpoint:
    """Where a listener waits. Keep `nonce` private: knowing it is what lets a peer in."""

    host: str
    port: int
    nonce: str


class Link:
    """Frames over one TCP connection: a kind, two numbers and, for some kinds, text.

    `hello` is what the connecting side said of itself: its stream.
    """

    def __init__(self, connection: socket.socket, hello: dict[str, str] | None = None) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connection
        self.hello = hello or {}
        host, port = connection.getpeername()[:2]
        self.peer = f"{host}:{port}"
        self.own_host: str = connection.getsockname()[0]

    def send(self, kind: bytes, first: int = 0, second: int = 0, data: bytes = b"") -> None:
        """Send one frame. OSError when the connection is lost."""
        self._socket.sendall(_FRAME.pack(kind, first, second) + data)

    def receive(self, until: Deadline | None) -> tuple[bytes, int, int]:
        """The next frame; without `until` for as long as the connection lasts.

        Raises:
            PairError: the peer gave up, in its own words.
            PairTimeout: none came.
            ConnectionError: the connection ended.
        """
        kind, first, second = _FRAME.unpack(self.take(_FRAME.size, until))
        if kind == FAILURE:
            text = self.take(min(first, _LONGEST_TEXT), until).decode(errors="replace")
            raise PairError(f"the peer gave up: {text}")
        return kind, first, second

    def take(self, count: int, until: Deadline | None) -> bytes:
        """Exactly `count` bytes; raises as `receive`."""
        data = bytearray()
        while len(data) < count:
            if until is not None and not self.readable(until.left()):
                raise PairTimeout(f"{self.peer} was silent for {until.seconds:.0f} s")
            part = self._socket.recv(count - len(data))
            if not part:
                raise ConnectionError(f"{self.peer} closed the connection")
            data += part
        return bytes(data)

    def put(self, data: bytes) -> None:
        """Send `data` as it is."""
        self._socket.sendall(data)

    def readable(self, seconds: float = 0.0) -> bool:
        """Whether something (the end included) can be read within `seconds`."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def ended(self) -> bool:
        """Whether the peer has closed its side; what it sent before may be unread."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def last_words(self) -> str | None:
        """Why the peer gave up, when it said so before its end."""
        until = Deadline(_LAST_WORDS_SECONDS)
        try:
            while True:
                self.receive(until)
        except PairTimeout:
            return None
        except PairError as error:
            return str(error)
        except OSError:
            return None

    def fail(self, reason: str) -> None:
        """Tell the peer why, and close."""
        text = reason.encode()[:_LONGEST_TEXT]
        try:
            self.send(FAILURE, len(text), 0, text)
        except OSError:
            pass  # it is gone already, and needs no reason
        finally:
            self.close()

    def close(self) -> None:
        """End the connection; a thread that reads it sees the end."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was first
        finally:
            self._socket.close()


def welcome(connection: socket.socket, nonce: str) -> Link:
    """The listener's half of the handshake.

    Raises:
        PairError, OSError or ValueError: the other side does not know the nonce, or our protocol.
    """
    until = Deadline(_HANDSHAKE_SECONDS)
    link = Link(connection)
    challenge = secrets.token_bytes(_CHALLENGE)
    link.put(_MAGIC + challenge)
    theirs = link.take(_CHALLENGE, until)
    proof = link.take(_PROOF, until)
    length = int.from_bytes(link.take(2, until), "big")
    if length > _LONGEST_TEXT:
        raise PairError("the peer speaks another protocol")
    hello = link.take(length, until)
    said = challenge + theirs + hello
    if not hmac.compare_digest(proof, _prove(nonce, b"connects", said)):
        raise PairError("the peer does not know the nonce")
    link.hello = json.loads(hello)
    link.put(_prove(nonce, b"listens", said))
    return link


def introduce(link: Link, nonce: str, until: Deadline) -> None:
    """The connecting side's half of the handshake.

    Raises:
        PairError: the listener's answer shows that it does not know the nonce.
        ConnectionError: it hung up, for ours is not the nonce that it wants.
    """
    if link.take(len(_MAGIC), until) != _MAGIC:
        raise PairError("what listens there is no pair channel")
    theirs, challenge = link.take(_CHALLENGE, until), secrets.token_bytes(_CHALLENGE)
    hello = json.dumps(link.hello).encode()
    said = theirs + challenge + hello
    proof = _prove(nonce, b"connects", said)
    link.put(challenge + proof + len(hello).to_bytes(2, "big") + hello)
    if not hmac.compare_digest(link.take(_PROOF, until), _prove(nonce, b"listens", said)):
        raise PairError("what listens there does not know the nonce")


def dial(endpoint: Endpoint, until: Deadline) -> socket.socket:
    """A connection to the endpoint, tried until somebody listens there; PairTimeout."""
    while True:
        try:
            return socket.create_connection((endpoint.host, endpoint.port), until.left())
        except OSError as error:
            if until.over():
                raise PairTimeout(
                    f"nobody listens there, tried for {until.seconds:.0f} s ({error})"
                ) from None
            time.sleep(min(0.05, until.left()))


def _prove(nonce: str, role: bytes, said: bytes) -> bytes:
    return hmac.new(nonce.encode(), role + said, hashlib.sha256).digest()
