"""Rank 0's connection with each other rank of a torchrun job: questions there, outcomes back.

Rank 0 listens where the job's store says, for whoever shows the job's secret; so what is unpickled
comes from the job's own ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

from hybridflow.cluster.host import Death, Outcome, this_node
from hybridflow.cluster.local_session import Lane
from hybridflow.cluster.ranks_store import RanksStore
from hybridflow.cluster.transfer import Piece

_DRIVER = "where rank 0 listens"
_LENGTH = struct.Struct("!Q")
_HELLO = struct.Struct("!32sI")
_GREETING_SECONDS, _CLOSE_SECONDS = 10.0, 2.0
_DATA_SECONDS = 6 * 3600.0
"""For rank 0 to read and tokenise the data, before it listens."""


@dataclass(frozen=True)
class Ask:
    """What a rank is to do: ``start`` a worker of the class ``target``, ``call`` the method of that
    name, ``stop`` the worker, or ``end`` itself."""

    what: str
    role: str = ""
    target: Any = None
    piece: Piece = Piece()


class Peer:
    """Another rank, as rank 0 sees it."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self._connection = connection
        self._open: dict[int, Future[Outcome]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._gone = ""
        self._sending = Lane(f"to-rank-{rank}")
        self._reading = threading.Thread(target=self._read, name=f"of-rank-{rank}", daemon=True)
        self._reading.start()

    def ask(self, ask: Ask) -> Future[Outcome]:
        """Sends it, behind what was asked before; a ``Death`` when the rank is gone."""
        future: Future[Outcome] = Future()
        with self._lock:
            number = next(self._numbers)
            if self._gone:
                future.set_result(Death(self._gone))
                return future
            self._open[number] = future
        self._sending.submit(self._send, number, ask)
        return future

    def _send(self, number: int, ask: Ask) -> None:
        try:
            send(self._connection, (number, ask))
        except OSError as error:
            self._lost(f"its connection broke: {error}")
        except Exception as error:  # noqa: BLE001 - what cannot be pickled raises anything
            with self._lock:
                future = self._open.pop(number)
            settle(future, Death(f"what it was asked cannot be sent: {error}"))

    def _read(self) -> None:
        try:
            while True:
                number, outcome = receive(self._connection)
                with self._lock:
                    future = self._open.pop(number)
                settle(future, outcome)
        except EOFError:
            self._lost("its process has ended")
        except OSError as error:
            self._lost(f"its connection broke: {error}")
        except Exception as error:  # noqa: BLE001 - as above, and nobody else would answer
            self._lost(f"its answer cannot be read: {error}")

    def _lost(self, cause: str) -> None:
        with self._lock:
            self._gone = self._gone or cause
            left, self._open = list(self._open.values()), {}
        for future in left:
            settle(future, Death(cause))

    def close(self) -> None:
        """Lets the rank go, behind what it was asked."""
        self.ask(Ask("end"))
        self._reading.join(_CLOSE_SECONDS)
        self._sending.close()
        self._connection.close()


def settle(future: Future[Outcome], outcome: Outcome) -> None:
    """Answers what is still open."""
    with contextlib.suppress(InvalidStateError):  # another thread has answered
        future.set_result(outcome)


class Line:
    """Rank 0, as another rank sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def asked(self) -> Iterator[tuple[int, Ask]]:
        """What rank 0 asks, until it says that this was all.

        Raises:
            ConnectionError: rank 0 is gone.
        """
        while True:
            try:
                number, ask = receive(self._connection)
            except (EOFError, OSError) as error:
                raise ConnectionError("rank 0, which drives the run, is gone") from error
            if ask.what == "end":
                self.close()
                return
            yield number, ask

    def close(self) -> None:
        """Says no more."""
        self._connection.close()

    def answer(self, number: int, outcome: Outcome) -> None:
        """What became of it."""
        try:
            send(self._connection, (number, outcome))
        except OSError as error:
            raise ConnectionError("rank 0, which drives the run, is gone") from error


def accept_peers(store: RanksStore, seconds: float) -> list[Peer]:
    """The other ranks by their numbers, once all have called.

    Raises:
        TimeoutError: naming those that did not call within ``seconds``.
    """
    address, deadline = this_node().address, time.monotonic() + seconds
    secret = secrets.token_bytes(32)
    peers: dict[int, Peer] = {}
    with socket.create_server((address, 0)) as listener:
        told = {"address": address, "port": listener.getsockname()[1], "secret": secret.hex()}
        store.tell(_DRIVER, json.dumps(told))
        while len(peers) < store.world - 1:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
                rank = _greeted(connection, secret)
            except TimeoutError:
                rank = None
            if rank is not None:
                peers[rank] = Peer(rank, connection)
            elif time.monotonic() > deadline:
                missing = sorted({*range(1, store.world)} - peers.keys())
                raise TimeoutError(
                    f"ranks {', '.join(map(str, missing))} did not call rank 0 at {address} within "
                    f"{seconds:g} s"
                )
    return [peers[rank] for rank in sorted(peers)]


def _greeted(connection: socket.socket, secret: bytes) -> int | None:
    """The rank that calls; None for anyone who does not know the secret."""
    connection.settimeout(_GREETING_SECONDS)
    try:
        shown, rank = _HELLO.unpack(_exactly(connection, _HELLO.size))
    except (OSError, EOFError):
        connection.close()
        return None
    if not hmac.compare_digest(shown, secret):
        connection.close()
        return None
    _prepare(connection)
    return rank


def call_home(store: RanksStore, seconds: float) -> Line:
    """Connects this rank with rank 0."""
    told = json.loads(store.hear(_DRIVER, _DATA_SECONDS))
    connection = socket.create_connection((told["address"], told["port"]), seconds)
    connection.sendall(_HELLO.pack(bytes.fromhex(told["secret"]), store.rank))
    _prepare(connection)
    return Line(connection)


def _prepare(connection: socket.socket) -> None:
    """Waits without an end: calls have deadlines of their own, and a rank may idle for hours."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send(connection: socket.socket, message: Any) -> None:
    """One message, whole."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> Any:
    """The next message; EOFError when the other side has ended."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))  # noqa: S301 - a rank of this job


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data
