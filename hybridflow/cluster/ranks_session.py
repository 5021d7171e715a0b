"""A session whose ranks torchrun has started: rank 0 drives, the others do what it asks.

Models take part on every rank: rank 0 sends each rank its piece of a call and gathers the outcomes.
What has no ranks, such as rollout engines and reward functions, lives on threads of rank 0's
process, beside the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from hybridflow.cluster.group import Ranks
from hybridflow.cluster.host import (
    Death,
    Outcome,
    Success,
    WorkerHost,
    set_this_node,
    this_node,
)
from hybridflow.cluster.local_session import Lane, LaneClosed, Threads, await_futures
from hybridflow.cluster.ranks_link import Ask, accept_peers, call_home, settle
from hybridflow.cluster.ranks_store import RanksStore
from hybridflow.cluster.session import GroupOrder, Place, Pool, Session
from hybridflow.cluster.transfer import Piece

Join = Callable[[RanksStore], Any]
"""Makes the job's process group from its store; collective."""


class RanksSession(Session):
    """Rank 0's view: it drives the job. The other ranks ``serve`` meanwhile.

    ``store`` connects the ranks; ``join`` makes the process group. Timeouts are in seconds.

    Attributes:
        stuck: whether a call failed on one rank while others wait for it.
    """

    def __init__(
        self,
        store: RanksStore,
        join: Join,
        *,
        start_timeout: float = 600.0,
        call_timeout: float = 3600.0,
    ) -> None:
        assert store.rank == 0, "the other ranks serve"
        super().__init__(start_timeout, call_timeout)
        self.world = store.world
        set_this_node(store.node())
        # One lane for all models: collectives of several must meet in one order on every rank.
        self._lane = Lane("rank-0")
        self._ordering = threading.Lock()
        self.stuck = False
        joining = self._lane.submit(join, store)
        self._peers = accept_peers(store, start_timeout)
        if not wait([joining], timeout=start_timeout).done:
            raise TimeoutError(
                f"rank 0 waited {start_timeout:g} s for the other ranks of {self.world} to join "
                "the job's process group: one may not have started, or cannot be reached"
            )
        joining.result()

    def pool(self, name: str, slots: int) -> Pool:
        """Slots of rank 0's machine, which alone has what is no model."""
        return Pool(name, (Place(this_node().id),) * slots)

    def _ranks(self, order: GroupOrder) -> Ranks:
        if order.independent:
            return Threads(order.name, order.worker_class, order.layout.world, order.init)
        if order.layout.world != self.world:
            raise ValueError(
                f"group '{order.name}': under torchrun a model has all {self.world} ranks, its "
                f"layout has {order.layout.world}"
            )
        return _Spread(order.name, order.worker_class, self, order.init)

    def ask_all(self, asks: Sequence[tuple[Ask, Any]]) -> list[Future[Outcome]]:
        """Has each rank do its part, in one order with all other calls on every rank.

        Args:
            asks: by rank what a peer is asked, and what rank 0 itself does.
        """
        with self._ordering:
            mine = self._lane.submit(asks[0][1])
            pairs = zip(self._peers, asks[1:], strict=True)
            return [mine, *(peer.ask(ask) for peer, (ask, _) in pairs)]

    def close(self) -> None:
        """Closes all groups, then lets the other ranks go."""
        problems = self._register.close()
        self._lane.close()
        for peer in self._peers:
            peer.close()
        if problems:
            raise problems[0]


class _Spread:
    """``Ranks`` of one model: a worker on every rank of the job."""

    def __init__(self, role: str, worker_class: type, session: RanksSession, init: Piece) -> None:
        self._role, self._class, self._init = role, worker_class, init
        self._session = session
        self._host = WorkerHost()
        self._turn: list[Future[Outcome]] = []
        self._open: set[Future[Outcome]] = set()  # of earlier calls too
        self._asks: list[tuple[Ask, Any]] = []

    def share(self, piece: Piece) -> Piece:
        return piece

    def start(self, rank: int, seconds: float) -> Future[Outcome]:
        world = self._session.world
        mine = partial(self._host.start, self._class, 0, world, ("", 0), self._init)
        return self._gathered(rank, Ask("start", self._role, self._class, self._init), mine)

    def submit(
        self, rank: int, method: str, shared: Piece, seconds: float, beside: bool
    ) -> Future[Outcome]:
        assert not beside, "a model's calls run one after the other"
        mine = partial(self._host.call, method, shared)
        return self._gathered(rank, Ask("call", self._role, method, shared), mine)

    def stop(self, rank: int) -> Future[Outcome]:
        return self._gathered(rank, Ask("stop", self._role), self._host.stop)

    def _gathered(self, rank: int, ask: Ask, mine: Callable[[], Outcome]) -> Future[Outcome]:
        """A call comes for rank 0, then 1 ...: with the last one all are sent on their way."""
        if rank == 0:
            self._turn = [Future() for _ in range(self._session.world)]
            self._asks = []
            for future in self._turn:
                self._open.add(future)
                future.add_done_callback(self._open.discard)
        if self._session.stuck:
            settle(self._turn[rank], Death("a rank is stuck in a call that failed"))
            return self._turn[rank]
        assert rank == len(self._asks), "a model's calls go to all ranks, in order"
        self._asks.append((ask, mine))
        if len(self._asks) == self._session.world:
            for mine_, theirs in zip(self._turn, self._session.ask_all(self._asks), strict=True):
                theirs.add_done_callback(partial(_pass_on, mine_))
        return self._turn[rank]

    def wait(
        self, pending: Sequence[Future[Outcome]], seconds: float, everything: bool
    ) -> list[Future[Outcome]]:
        return await_futures(pending, seconds, everything)

    def outcome(self, pending: Future[Outcome]) -> Outcome:
        return pending.result(timeout=0)

    def log_tail(self, rank: int) -> str:
        return ""

    def kill(self) -> None:
        """Nothing more is asked; torchrun ends the processes of a job that fails. Where a call has
        not ended, its ranks wait for one that failed, and do nothing else any more."""
        left = [*self._open]
        self._session.stuck |= bool(left)
        for future in left:
            settle(future, Death("its group was closed"))


def _pass_on(future: Future[Outcome], done: Future[Outcome]) -> None:
    if isinstance(error := done.exception(), LaneClosed):
        settle(future, Death("its group was closed"))
    elif error is not None:
        settle(future, Death(f"its driver failed: {error}"))
    else:
        settle(future, done.result())


def serve(store: RanksStore, join: Join, *, start_timeout: float = 600.0) -> None:
    """What every rank but the first does: as rank 0 asks, until it lets this rank go.

    Raises:
        ConnectionError: rank 0 is gone.
    """
    set_this_node(store.node())
    line = call_home(store, start_timeout)
    join(store)
    hosts: dict[str, WorkerHost] = {}
    for number, ask in line.asked():
        line.answer(number, _done(hosts, ask, store))


def _done(hosts: dict[str, WorkerHost], ask: Ask, store: RanksStore) -> Outcome:
    if ask.what == "start":
        host = hosts[ask.role] = WorkerHost()
        return host.start(ask.target, store.rank, store.world, ("", 0), ask.piece)
    if ask.what == "stop":
        return hosts[ask.role].stop() if ask.role in hosts else Success(None)
    return hosts[ask.role].call(ask.target, ask.piece)
