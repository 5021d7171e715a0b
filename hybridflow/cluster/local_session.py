"""The in-process twin of the Ray session: every worker lives in this process, on its own thread."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from typing import Any

from hybridflow.cluster.group import Ranks
from hybridflow.cluster.host import (
    Death,
    Outcome,
    Rendezvous,
    WorkerHost,
    free_port,
    this_node,
)
from hybridflow.cluster.session import GroupOrder, Place, Pool, Session
from hybridflow.cluster.transfer import Piece


class LocalSession(Session):
    """A session without Ray; a parallel layout must be of one rank, since the ranks of
    a process group are processes. Independent workers may be several.

    A worker that hangs past its deadline cannot be killed here: its thread is left behind, and
    ends with the process.
    """

    def __init__(self, *, start_timeout: float = 600.0, call_timeout: float = 3600.0) -> None:
        super().__init__(start_timeout, call_timeout)

    def pool(self, name: str, slots: int) -> Pool:
        """Any number of slots: nothing is reserved in one process."""
        if slots < 1:
            raise ValueError(f"pool '{name}': at least one slot is needed, got {slots}")
        return Pool(name, (Place(this_node().id),) * slots)

    def _ranks(self, order: GroupOrder) -> Ranks:
        if not order.independent and order.layout.world > 1:
            raise ValueError(
                f"group '{order.name}': a session in one process runs one rank per role, the "
                f"layout has {order.layout.world}; use tp=pp=dp=1 or a RaySession"
            )
        order.slots()
        return Threads(order.name, order.worker_class, order.layout.world, order.init)

    def close(self) -> None:
        """Closes every group."""
        if problems := self._register.close():
            raise problems[0]


class LaneClosed(Exception):
    """The lane was closed before the call had ended."""


class Lane:
    """A daemon thread that runs calls in order. (An executor's threads would keep a process with
    a hanging worker from ending.)"""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(LaneClosed())
                return future
            self._open.add(future)
        self._calls.put(lambda: self._answer(future, function, args))
        return future

    def close(self) -> None:
        """Calls that have not ended fail at once; no further one begins."""
        with self._lock:
            self._closed = True
            for future in self._open:
                future.set_exception(LaneClosed())
            self._open.clear()
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._closed:
                call()

    def _answer(self, future: Future[Any], function: Callable[..., Any], args: Any) -> None:
        try:
            answer, error = function(*args), None
        except BaseException as caught:  # noqa: BLE001 - handed on through the future
            answer, error = None, caught
        with self._lock:
            if future not in self._open:
                return
            self._open.remove(future)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(answer)


def await_futures(
    pending: Sequence[Future[Outcome]], seconds: float, everything: bool
) -> list[Future[Outcome]]:
    """Those that are done, once one is, or all are, or the time is over."""
    mode = ALL_COMPLETED if everything else FIRST_COMPLETED
    return list(wait(pending, timeout=seconds, return_when=mode).done)


class Threads:
    """``Ranks`` as threads of this process."""

    def __init__(self, role: str, worker_class: type, world: int, init: Piece) -> None:
        self._class = worker_class
        self._world = world
        self._init = init
        self._rendezvous: Rendezvous = ("127.0.0.1", free_port())
        self._hosts = [WorkerHost() for _ in range(world)]
        self._lanes = [Lane(f"{role}-{rank}") for rank in range(world)]
        self._beside = [Lane(f"{role}-{rank}-beside") for rank in range(world)]

    def share(self, piece: Piece) -> Piece:
        return piece

    def start(self, rank: int, seconds: float) -> Future[Outcome]:
        start = self._hosts[rank].start
        return self._lanes[rank].submit(
            start, self._class, rank, self._world, self._rendezvous, self._init
        )

    def submit(
        self, rank: int, method: str, shared: Piece, seconds: float, beside: bool
    ) -> Future[Outcome]:
        lanes = self._beside if beside else self._lanes
        return lanes[rank].submit(self._hosts[rank].call, method, shared)

    def stop(self, rank: int) -> Future[Outcome]:
        return self._lanes[rank].submit(self._hosts[rank].stop)

    def wait(
        self, pending: Sequence[Future[Outcome]], seconds: float, everything: bool
    ) -> list[Future[Outcome]]:
        return await_futures(pending, seconds, everything)

    def outcome(self, pending: Future[Outcome]) -> Outcome:
        if isinstance(pending.exception(timeout=0), LaneClosed):
            return Death("its group was closed")
        return pending.result(timeout=0)

    def log_tail(self, rank: int) -> str:
        return ""

    def kill(self) -> None:
        for lane in (*self._lanes, *self._beside):
            lane.close()
