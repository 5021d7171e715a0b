"""Runs a worker object's methods and answers with outcomes, in a process or on a thread.

Exceptions travel as text, so that an error arrives whole even when its class cannot be pickled.
"""

import random
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.cluster.transfer import Piece

Rendezvous = tuple[str, int]


@dataclass(frozen=True)
class Node:
    """The machine that a worker's process runs on.

    Attributes:
        id: differs from every other machine's of the session; its processes share memory.
        address: at which the other machines reach it.
    """

    id: str
    address: str


_node = Node("here", "127.0.0.1")


def this_node() -> Node:
    """The machine of this process."""
    return _node


def set_this_node(node: Node) -> None:
    """Tell a worker's process, before its worker is made, which machine it is on."""
    global _node
    _node = node


@dataclass(frozen=True)
class Success:
    """A method's result."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """A method raised; ``at`` is the worker's clock in seconds since the epoch."""

    kind: str
    message: str
    trace: str
    at: float


@dataclass(frozen=True)
class Death:
    """The process is gone."""

    cause: str


Outcome = Success | Failure | Death


def attempt(function: Any, /, *args: Any, **kwargs: Any) -> Success | Failure:
    """Calls ``function``; an exception becomes a ``Failure``, which the caller's side raises."""
    try:
        return Success(function(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - the edge of the process: raised again by the driver
        trace = "".join(traceback.format_exception(error))
        return Failure(type(error).__name__, str(error), trace, time.time())


class WorkerHost:
    """Holds one worker. Calls run one after the other, in the order in which they were made."""

    def __init__(self) -> None:
        self._worker: Any = None

    def start(
        self, worker_class: type, rank: int, world: int, rendezvous: Rendezvous, init: Piece
    ) -> Outcome:
        """Makes the worker; ``init.kwargs`` are its own keyword arguments."""
        outcome = attempt(
            worker_class, rank=rank, world=world, rendezvous=rendezvous, **init.kwargs
        )
        if isinstance(outcome, Success):
            self._worker = outcome.value
            return Success(None)
        return outcome

    def call(self, method: str, piece: Piece) -> Outcome:
        """Calls the worker's method."""
        if self._worker is None:
            return Failure("RuntimeError", "the worker's constructor failed", "", time.time())
        return attempt(getattr(self._worker, method), *piece.args, **piece.kwargs)

    def stop(self) -> Outcome:
        """Calls the worker's ``close`` where it has one."""
        close = getattr(self._worker, "close", None)
        return attempt(close) if close is not None else Success(None)


def free_port() -> int:
    """A free TCP port below the range from which the kernel serves outgoing connections, so that
    none of these takes it before the group listens on it."""
    for port in random.SystemRandom().sample(range(20000, 32000), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("none of 200 ports tried between 20000 and 32000 is free on this node")


def init_arguments(init: Mapping[str, Any] | None) -> Piece:
    """The worker's own keyword arguments as a piece."""
    return Piece((), dict(init or {}))
