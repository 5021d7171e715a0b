"""A worker group: the ranks of one role, called as one.

A call is submitted to every rank at once and collected by the group's waiter. The first failure
wins: it breaks the group, and its other ranks, which may hang in a collective, are killed.
"""

import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

from hybridflow.cluster.errors import (
    CallTimeout,
    ClusterError,
    GroupClosed,
    WorkerDied,
    WorkerError,
)
from hybridflow.cluster.host import Death, Failure, Outcome, Success
from hybridflow.cluster.transfer import Piece, Transfer, transfer_of
from megatron_bridge.layout import ParallelLayout

SETTLE_SECONDS = 2.0
"""After a rank's exception: how long the cause may take to show up at another rank, since a
process that dies makes its peers' collectives raise before its own end is noticed."""

CLOSE_SECONDS = 10.0
"""How long a healthy group's workers may take to close before their processes are ended."""


class Ranks(Protocol):
    """How a group reaches its processes (or threads). ``Pending`` is an answer to come."""

    def share(self, piece: Piece) -> Any:
        """Puts the piece where every rank can read it."""
        ...

    def start(self, rank: int, seconds: float) -> Any:
        """Makes the worker; gives a pending outcome."""
        ...

    def submit(self, rank: int, method: str, shared: Any, seconds: float, beside: bool) -> Any:
        """Queues a call, behind others or beside them; gives a pending outcome."""
        ...

    def stop(self, rank: int) -> Any:
        """Queues the worker's ``close``; gives a pending outcome."""
        ...

    def wait(self, pending: Sequence[Any], seconds: float, everything: bool) -> list[Any]:
        """The pending that are done once one is (or all are), or when the time is up."""
        ...

    def outcome(self, pending: Any) -> Outcome:
        """The outcome of a pending that is done."""
        ...

    def log_tail(self, rank: int) -> str:
        """The last lines that the rank wrote, under a heading; empty when there are none."""
        ...

    def kill(self) -> None:
        """Ends every process of the group and all that these started."""
        ...


@dataclass(frozen=True)
class _Call:
    method: str
    seconds: float
    pending: Mapping[int, Any]


class WorkerGroup:
    """The ranks of one role; made by a session, which closes it.

    ``waiters`` is how many calls may be waited for at once: one where every call goes to all
    ranks, one per rank where the ranks work independently.
    """

    def __init__(
        self,
        role: str,
        worker_class: type,
        layout: ParallelLayout,
        ranks: Ranks,
        *,
        start_seconds: float,
        call_seconds: float,
        waiters: int = 1,
    ) -> None:
        self.role = role
        self.layout = layout
        self._class = worker_class
        self._ranks = ranks
        self._call_seconds = call_seconds
        self._turns = itertools.count()
        self._lock = threading.Lock()  # calls reach all ranks in one order
        self._broken: ClusterError | None = None
        self._left: Exception | None = None  # why its processes could not be ended
        self._stopping: dict[int, Any] = {}
        self._breaking = threading.Lock()
        self._waiters = ThreadPoolExecutor(waiters, thread_name_prefix=f"wait-{role}")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix=f"wait-beside-{role}")
        pending = {rank: ranks.start(rank, start_seconds) for rank in range(self.world)}
        start = _Call("__init__", start_seconds, pending)
        self._started = self._waiters.submit(self._collect, start)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.layout.world

    @property
    def started(self) -> Future[Any]:
        """Done once every rank's constructor has ended; raises as a call does."""
        return self._started

    @property
    def over(self) -> bool:
        """Whether it broke or was closed: it takes no more calls, and its processes are ended."""
        return self._broken is not None

    def wait_until_started(self) -> "WorkerGroup":
        """Waits for every rank's constructor; raises as a call does."""
        self._started.result()
        return self

    def call(
        self, method: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Future[Any]:
        """Calls ``WorkerClass.method`` on the ranks, by the protocol that the method declares.

        ``timeout`` is in seconds, from when the call's answers are waited for (calls of one group
        run in order); past it the future raises ``CallTimeout``. The future also raises
        ``WorkerError`` and ``WorkerDied``. After any of them the group takes no more calls.
        """
        name = method.__name__
        if getattr(self._class, name, None) is not method:
            raise ValueError(
                f"{method.__qualname__} is no method of {self._class.__name__}, the class of "
                f"group '{self.role}'"
            )
        protocol = transfer_of(method)
        seconds = self._call_seconds if timeout is None else timeout
        with self._lock:
            if self._broken is not None:
                raise copy.copy(self._broken)
            pieces = protocol.split(args, kwargs, self.layout, next(self._turns))
            beside = bool(getattr(method, "beside", False))
            call = _Call(name, seconds, self._submit(name, pieces, seconds, beside))
            waiters = self._beside if beside else self._waiters
            return waiters.submit(self._finish, call, protocol)

    def run(
        self, method: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """``call`` and wait for its result."""
        return self.call(method, *args, timeout=timeout, **kwargs).result()

    def _submit(
        self, method: str, pieces: Sequence[Piece | None], seconds: float, beside: bool
    ) -> dict[int, Any]:
        assert len(pieces) == self.world, "split gives one piece per rank"
        shared: dict[int, Any] = {}
        pending = {}
        for rank, piece in enumerate(pieces):
            if piece is None:
                continue
            if id(piece) not in shared:
                shared[id(piece)] = self._ranks.share(piece)
            pending[rank] = self._ranks.submit(rank, method, shared[id(piece)], seconds, beside)
        return pending

    def _finish(self, call: _Call, protocol: Transfer) -> Any:
        self._started.result()
        values = self._collect(call)
        return protocol.merge([values.get(rank) for rank in range(self.world)], self.layout)

    def _collect(self, call: _Call) -> dict[int, Any]:
        """The results by rank; raises the group's first failure."""
        deadline = time.monotonic() + call.seconds
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(call.pending):
            arrived = self._wait(call, outcomes, deadline - time.monotonic())
            outcomes |= arrived
            if any(not isinstance(outcome, Success) for outcome in arrived.values()):
                if not any(isinstance(outcome, Death) for outcome in arrived.values()):
                    outcomes |= self._wait(call, outcomes, SETTLE_SECONDS, everything=True)
                raise self._break(self._error(call.method, outcomes))
            if not arrived:
                late = tuple(sorted(set(call.pending) - set(outcomes)))
                log = self._ranks.log_tail(late[0])
                raise self._break(CallTimeout(self.role, late, call.method, call.seconds, log))
        return {rank: out.value for rank, out in outcomes.items() if isinstance(out, Success)}

    def _wait(
        self, call: _Call, known: Mapping[int, Outcome], seconds: float, everything: bool = False
    ) -> dict[int, Outcome]:
        open_ = {rank: pending for rank, pending in call.pending.items() if rank not in known}
        done = self._ranks.wait(list(open_.values()), max(0.0, seconds), everything)
        return {rank: self._ranks.outcome(p) for rank, p in open_.items() if p in done}

    def _error(self, method: str, outcomes: Mapping[int, Outcome]) -> ClusterError:
        """The first cause: a death before exceptions, the earliest exception before others."""
        rank = min(
            (rank for rank, outcome in outcomes.items() if not isinstance(outcome, Success)),
            key=lambda rank: getattr(outcomes[rank], "at", 0.0),
        )
        others = [
            f"rank {other}: {outcome.kind}: {outcome.message}"
            for other, outcome in sorted(outcomes.items())
            if other != rank and isinstance(outcome, Failure)
        ]
        also = f"(after it {'; '.join(others)})" if others else ""
        first = outcomes[rank]
        if isinstance(first, Failure):
            return WorkerError(
                self.role, rank, method, first.kind, first.message, first.trace, also
            )
        assert isinstance(first, Death)
        log = self._ranks.log_tail(rank)
        return WorkerDied(self.role, rank, method, first.cause, log, also)

    def _break(self, error: ClusterError) -> ClusterError:
        """Marks the group broken and kills it; gives the error that broke it first. A problem of
        killing is a note of that error, and what ``close`` raises."""
        with self._breaking:
            if self._broken is None:
                self._broken = error
                try:
                    self._ranks.kill()
                except Exception as problem:  # noqa: BLE001 - told, and raised by `close`
                    error.add_note(f"ending the processes of '{self.role}' failed: {problem}")
                    self._left = problem
            return copy.copy(self._broken)

    def begin_close(self) -> None:
        """Queues each worker's ``close`` behind its calls, without waiting."""
        with self._lock:
            if self._broken is None and not self._stopping:
                self._stopping = {rank: self._ranks.stop(rank) for rank in range(self.world)}

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Lets each worker's ``close`` run for up to ``seconds``, then ends the processes; calls
        still on their way raise ``GroupClosed``. Raises ``WorkerError``, with everything ended,
        when a worker's ``close`` raised, and what kept processes from being ended. Safe to call
        again."""
        self.begin_close()
        stopping, self._stopping = self._stopping, {}
        done = self._ranks.wait(list(stopping.values()), seconds, True) if stopping else []
        outcomes = {r: self._ranks.outcome(p) for r, p in stopping.items() if p in done}
        self._break(GroupClosed(self.role))
        self._waiters.shutdown(wait=True)
        self._beside.shutdown(wait=True)
        if self._left is not None:
            problem, self._left = self._left, None
            raise problem
        if any(isinstance(outcome, Failure) for outcome in outcomes.values()):
            raise self._error("close", outcomes)


def wait_until_started(groups: Iterable[WorkerGroup]) -> None:
    """Waits until all have started; the first that fails is told at once, though others still
    load for minutes."""
    starting = [group.started for group in groups]
    for future in wait(starting, return_when=FIRST_EXCEPTION).done:
        future.result()
