"""A session whose ranks torchrun has started: every rank runs the same loop with its own worker.

A call is made by all ranks alike and in one order. Each runs its own worker's method; the outcomes
are gathered, so that every rank has the result that a driver would have.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, InvalidStateError, wait
from functools import partial
from typing import Any

from hybridflow.cluster.group import Ranks
from hybridflow.cluster.host import (
    Death,
    Failure,
    Outcome,
    Success,
    WorkerHost,
    attempt,
    this_node,
)
from hybridflow.cluster.local_session import Lane, LaneClosed
from hybridflow.cluster.ranks_store import RanksStore
from hybridflow.cluster.session import GroupOrder, Place, Pool, Session
from hybridflow.cluster.transfer import Piece

Join = Callable[[RanksStore], Any]
"""Makes the job's process group from its store; gives one of gloo, for results."""

_POLL_SECONDS = 0.2
_LAST_WORDS_SECONDS = 2.0
"""How long a rank whose collective broke waits for another one to say what it died of."""


class RanksSession(Session):
    """One rank's view. Every group has all ranks of the job, whose processes its roles share.

    ``store`` connects the ranks; ``join`` makes the process group. Timeouts are in seconds.
    """

    def __init__(
        self,
        store: RanksStore,
        join: Join,
        *,
        start_timeout: float = 600.0,
        call_timeout: float = 3600.0,
    ) -> None:
        super().__init__(start_timeout, call_timeout)
        self.store = store
        self.rank, self.world = store.rank, store.world
        # One lane for all groups: collectives of several must meet in one order on every rank.
        self._lane = Lane(f"rank-{self.rank}")
        self._control = self._join(join, start_timeout)

    def _join(self, join: Join, seconds: float) -> Any:
        joining = self._lane.submit(join, self.store)
        if not wait([joining], timeout=seconds).done:
            raise TimeoutError(
                f"rank {self.rank} waited {seconds:g} s for the other ranks of {self.world} to "
                "join the job's process group: one may not have started, or cannot be reached"
            )
        return joining.result()

    def pool(self, name: str, slots: int) -> Pool:
        """The ranks' own devices."""
        if slots != self.world:
            raise ValueError(f"pool '{name}': {slots} slots of a job of {self.world} ranks")
        return Pool(name, (Place(this_node().id),) * slots)

    def _ranks(self, order: GroupOrder) -> Ranks:
        if order.independent or order.layout.world != self.world:
            raise ValueError(
                f"group '{order.name}': under torchrun every role has all {self.world} ranks"
            )
        return _Ranks(order.name, order.worker_class, self, order.init)

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, by rank; collective, on the lane."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._control)
        return values

    @property
    def lane(self) -> Lane:
        """Where this rank's calls run, one after the other."""
        return self._lane

    def close(self) -> None:
        """Closes this rank's workers. The process group ends with the process."""
        problems = self._register.close()
        self._lane.close()
        if problems:
            raise problems[0]


class _Ranks:
    """``Ranks`` of one role: this rank's worker, and what the other ranks answer."""

    def __init__(self, role: str, worker_class: type, session: RanksSession, init: Piece) -> None:
        self._role, self._class, self._init = role, worker_class, init
        self._session = session
        self._host = WorkerHost()
        self._turn: list[Future[Outcome]] = []
        self._open = True

    def share(self, piece: Piece) -> Piece:
        return piece

    def start(self, rank: int, seconds: float) -> Future[Outcome]:
        world = self._session.world
        start = partial(
            self._host.start, self._class, self._session.rank, world, ("", 0), self._init
        )
        return self._answer(rank, "__init__", start)

    def submit(
        self, rank: int, method: str, shared: Piece, seconds: float, beside: bool
    ) -> Future[Outcome]:
        return self._answer(rank, method, partial(self._host.call, method, shared))

    def _answer(self, rank: int, method: str, call: partial[Outcome]) -> Future[Outcome]:
        """A call is submitted to rank 0, then 1 ...: a new turn begins with rank 0."""
        if rank == 0:
            self._turn = [Future() for _ in range(self._session.world)]
        if rank == self._session.rank:
            self._session.lane.submit(self._run, method, call, self._turn)
        return self._turn[rank]

    def _run(self, method: str, call: partial[Outcome], turn: list[Future[Outcome]]) -> None:
        mine = call()
        if isinstance(mine, Failure):
            self._session.store.fail(self._role, method, mine)
            _settle(turn[self._session.rank], mine)
            return
        gathered = attempt(self._session.gather, mine)
        if isinstance(gathered, Success):
            for future, outcome in zip(turn, gathered.value, strict=True):
                _settle(future, outcome)
            return
        _settle(turn[self._session.rank], mine)
        time.sleep(_LAST_WORDS_SECONDS)  # `wait` sees meanwhile what a rank says that failed
        for future in turn:
            _settle(future, Death(f"its connection broke: {gathered.message}"))

    def stop(self, rank: int) -> Future[Outcome]:
        if rank == self._session.rank:
            return self._session.lane.submit(self._host.stop)
        done: Future[Outcome] = Future()
        done.set_result(Success(None))
        return done

    def wait(
        self, pending: Sequence[Future[Outcome]], seconds: float, everything: bool
    ) -> list[Future[Outcome]]:
        deadline = time.monotonic() + seconds
        mode = ALL_COMPLETED if everything else FIRST_COMPLETED
        while True:
            left = max(0.0, deadline - time.monotonic())
            done = wait(pending, timeout=min(left, _POLL_SECONDS), return_when=mode).done
            if len(done) == len(pending) or (done and not everything) or not left:
                return list(done)
            self._look_for_failures()

    def _look_for_failures(self) -> None:
        """What another rank has failed of becomes its answer."""
        failed = self._session.store.failure() if self._open else None
        if failed is not None and failed.rank != self._session.rank and self._turn:
            _settle(self._turn[failed.rank], failed.failure)

    def outcome(self, pending: Future[Outcome]) -> Outcome:
        if isinstance(pending.exception(timeout=0), LaneClosed):
            return Death("its group was closed")
        return pending.result(timeout=0)

    def log_tail(self, rank: int) -> str:
        return ""

    def kill(self) -> None:
        """Nothing more is asked of the worker; torchrun ends the processes of a job that fails."""
        self._open = False
        for future in self._turn:
            _settle(future, Death("its group was closed"))


def _settle(future: Future[Outcome], outcome: Outcome) -> None:
    """Answers what is still open."""
    with contextlib.suppress(InvalidStateError):  # another thread has answered
        future.set_result(outcome)
