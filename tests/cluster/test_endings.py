"""What a group says when its start, or its end, goes wrong: nothing of it needs Ray."""

import contextlib
import json
import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridflow.batch import Batch
from hybridflow.cluster import (
    GATHER,
    ONE_TO_ALL,
    ClusterError,
    LocalSession,
    RanksSession,
    RanksStore,
    WorkerError,
    transfer,
    wait_until_started,
)
from hybridflow.cluster import session as session_module
from hybridflow.cluster.host import Death, Success, free_port
from hybridflow.cluster.local_session import Lane, LaneClosed, Threads
from hybridflow.cluster.ranks_link import Ask, Peer, accept_peers, call_home
from hybridflow.cluster.ranks_store import NEEDED
from hybridflow.cluster.session import GroupOrder
from megatron_bridge.layout import ParallelLayout

_loaded = threading.Event()


class Loading:
    """Loads until the test has ended."""

    def __init__(self, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        _loaded.wait(60)


class Refusing:
    """Cannot be made."""

    def __init__(self, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        raise ValueError("no weights here")


class Failing:
    """Is made, and fails in its one call."""

    def __init__(self, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        pass

    @transfer(ONE_TO_ALL)
    def work(self) -> Batch:
        raise LookupError("no such token: 7")


class Unkillable(Threads):
    """Ranks whose processes cannot be ended."""

    def kill(self) -> None:
        super().kill()
        raise TimeoutError("processes 4711 are still there")


class UnkillableSession(LocalSession):
    def _ranks(self, order: GroupOrder) -> Unkillable:
        return Unkillable(order.name, order.worker_class, order.layout.world, order.init)


@pytest.fixture
def local() -> Iterator[LocalSession]:
    _loaded.clear()
    with LocalSession() as session:
        yield session
        _loaded.set()


def test_a_start_that_fails_is_told_while_others_load(local: LocalSession) -> None:
    loading = local.group("slow", Loading, ParallelLayout())
    refusing = local.group("sick", Refusing, ParallelLayout())
    with pytest.raises(WorkerError, match="sick rank 0: ValueError in __init__: no weights here"):
        wait_until_started([loading, refusing])
    assert not loading.started.done()


class Late:
    """Fails on the first rank because it has on the second."""

    failed = threading.Event()

    def __init__(self, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        self._rank = rank

    @transfer(GATHER)
    def work(self) -> None:
        if self._rank == 1:
            raise LookupError("the cause")
        Late.failed.wait(0.3)  # the other's exception is older then
        raise ConnectionError("a peer is gone")


def test_the_earliest_exception_is_the_cause(local: LocalSession) -> None:
    group = local.group("late", Late, 2)
    with pytest.raises(WorkerError, match="late rank 1: LookupError in work: the cause") as caught:
        group.run(Late.work)
    assert "after it rank 0: ConnectionError: a peer is gone" in str(caught.value)


def test_processes_that_cannot_be_ended_hide_no_cause() -> None:
    session = UnkillableSession()
    group = session.group("failing", Failing, ParallelLayout())
    with pytest.raises(WorkerError, match="no such token: 7") as caught:
        group.run(Failing.work)
    (note,) = caught.value.__notes__
    assert note == "ending the processes of 'failing' failed: processes 4711 are still there"
    with pytest.raises(TimeoutError, match="4711"):
        session.close()
    session.close()


def test_a_closed_lane_answers_at_once() -> None:
    lane = Lane("closed")
    lane.close()
    assert isinstance(lane.submit(print).exception(timeout=60), LaneClosed)


def test_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ("0", "1", "0", "127.0.0.1", str(free_port()))
    for name, value in zip(NEEDED, told, strict=True):
        monkeypatch.setenv(name, value)
    meet = threading.Event()
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0.1 s for the other ranks of 1 to join"):
        RanksSession(RanksStore(60), lambda store: meet.wait(60), start_timeout=0.1)
    meet.set()
    with pytest.raises(TimeoutError, match=r"ranks 1, 2 did not call rank 0 at .* within 0.1 s"):
        accept_peers(Store(world=3), 0.1)


class Waiting:
    """Does not end while the test lasts."""

    ends = threading.Event()

    def __init__(self, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        pass

    @transfer(ONE_TO_ALL)
    def work(self) -> None:
        Waiting.ends.wait(60)


def test_a_torchrun_session_closes_beside_a_call_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Ctrl-C within an update does: the call is told at once, not at its own deadline."""
    for name, value in zip(NEEDED, ("0", "1", "0", "127.0.0.1", str(free_port())), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(session_module, "CLOSE_SECONDS", 0.5)
    session = RanksSession(RanksStore(60), lambda store: None)
    group = session.group("waiting", Waiting, ParallelLayout(), session.pool("all", 1))
    group.wait_until_started()
    call = group.call(Waiting.work)
    closing = ThreadPoolExecutor(1).submit(session.close)
    with pytest.raises(ClusterError):
        call.result(timeout=30)
    closing.result(timeout=30)
    Waiting.ends.set()


def test_what_cannot_be_sent_is_answered() -> None:
    here, there = socket.socketpair()
    peer = Peer(1, here)
    asked = peer.ask(Ask("call", "x", lambda: None)).result(timeout=30)
    assert isinstance(asked, Death) and "cannot be sent" in asked.cause
    answered = peer.ask(Ask("stop", "x"))
    there.sendall(b"\0" * 7 + b"\2" + b"no")
    outcome = answered.result(timeout=30)
    assert isinstance(outcome, Death) and "cannot be read" in outcome.cause
    there.close()
    peer.close()


def test_a_stranger_is_not_let_in() -> None:
    """Without the job's secret nothing that is sent is read, and the ranks still meet."""
    store = Store(world=2)
    peers = ThreadPoolExecutor(1).submit(accept_peers, store, 60.0)
    told = json.loads(store.hear("where rank 0 listens", 60))
    with socket.create_connection((told["address"], told["port"]), 30) as stranger:
        stranger.sendall(bytes(32) + b"\0\0\0\1" + pickle.dumps(print))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    line = call_home(store, 60.0)
    (peer,) = peers.result(timeout=60)
    answer = peer.ask(Ask("stop", "x"))
    number, ask = next(line.asked())
    assert ask == Ask("stop", "x")
    line.answer(number, Success(7))
    assert answer.result(timeout=60) == Success(7)
    line.close()
    gone = peer.ask(Ask("stop", "x")).result(timeout=60)
    assert isinstance(gone, Death) and "its process has ended" in gone.cause


class Store:
    """What two ends of one process say to each other."""

    def __init__(self, world: int) -> None:
        self.rank, self.world = 1, world
        self._said: dict[str, str] = {}
        self._told = threading.Event()

    def tell(self, key: str, text: str) -> None:
        self._said[key] = text
        self._told.set()

    def hear(self, key: str, seconds: float) -> str:
        assert self._told.wait(seconds)
        return self._said[key]
