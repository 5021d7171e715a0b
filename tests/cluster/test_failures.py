"""What a failing worker looks like from the driver: the cause, role and rank first."""

import re

import pytest

from hybridflow.cluster import (
    CallTimeout,
    LocalSession,
    Pool,
    RaySession,
    WorkerDied,
    WorkerError,
)
from hybridflow.cluster.errors import ClusterError
from megatron_bridge.layout import ParallelLayout
from tests.cluster.workers import Broken, Worker

TWO = ParallelLayout(dp=2)


@pytest.mark.parametrize(
    "how", ["exit", *(pytest.param(how, marks=pytest.mark.slow) for how in ("kill", "raise"))]
)
def test_the_failing_rank_is_named_while_its_peer_hangs(
    session: RaySession, pool: Pool, how: str
) -> None:
    group = session.group(f"fails-{how}", Worker, TWO, pool).wait_until_started()
    (child, _) = group.run(Worker.spawn)
    failing = group.call(Worker.hang_unless, 1, how)
    queued = group.call(Worker.total, 1)
    with pytest.raises(ClusterError) as caught:
        failing.result(timeout=120)
    error = caught.value
    assert error.rank == 1 and error.role == f"fails-{how}"  # type: ignore[attr-defined]
    first_line = str(error).splitlines()[0]
    if how == "raise":
        assert isinstance(error, WorkerError)
        assert first_line == "fails-raise rank 1: LookupError in hang_unless: no such token: 7"
        assert re.search(r'workers.py", line \d+, in hang_unless', error.trace)
    else:
        assert isinstance(error, WorkerDied)
        assert first_line.startswith(f"fails-{how} rank 1 died in hang_unless: process ")
        assert "actor_id" not in first_line
    if how == "exit":
        assert "about to leave" in error.log  # type: ignore[attr-defined]
    with pytest.raises(type(error)) as again:
        queued.result(timeout=120)
    assert str(again.value) == str(error), "later calls raise the first cause"
    with pytest.raises(type(error), match="rank 1"):
        group.run(Worker.total, 1)
    assert child not in _pids_of(session, group.role), "the peers and their children are ended"


def _pids_of(session: RaySession, role: str) -> list[int]:
    from hybridflow.cluster import processes

    return [process.pid for process in processes.marked(f"{session.mark}{role}/")]


def test_a_constructor_that_fails_on_one_rank_fails_the_group(
    session: RaySession, pool: Pool
) -> None:
    group = session.group("broken", Broken, TWO, pool)
    queued = group.call(Broken.ping)
    with pytest.raises(WorkerError, match="broken rank 1: ValueError in __init__: no weights here"):
        queued.result(timeout=120)
    with pytest.raises(WorkerError, match="no weights here"):
        group.wait_until_started()


def test_a_deadline_names_the_call_and_the_rank_and_shows_its_stack(
    session: RaySession, pool: Pool
) -> None:
    group = session.group("slow", Worker, 1, pool).wait_until_started()
    with pytest.raises(CallTimeout, match="no answer to sleep within 3 s from rank 0") as caught:
        group.run(Worker.sleep, 300.0, timeout=3.0)
    assert isinstance(caught.value, TimeoutError)
    assert re.search(r'workers.py", line \d+ in sleep', caught.value.log)


def test_failures_in_one_process_look_the_same() -> None:
    with LocalSession() as local:
        group = local.group("alone", Worker, ParallelLayout())
        with pytest.raises(WorkerError) as caught:
            group.run(Worker.hang_unless, 0, "raise")
        first_line = str(caught.value).splitlines()[0]
        assert first_line == "alone rank 0: LookupError in hang_unless: no such token: 7"
        with pytest.raises(WorkerError, match="no such token"):
            group.run(Worker.total, 1)
        slow = local.group("slow", Worker, ParallelLayout())
        with pytest.raises(CallTimeout, match="slow: no answer to sleep within 0.2 s from rank 0"):
            slow.run(Worker.sleep, 5.0, timeout=0.2)
        broken = local.group("picky", Worker, ParallelLayout(), None, {"unknown": 1})
        with pytest.raises(WorkerError, match="picky rank 0: TypeError in __init__.*unknown"):
            broken.run(Worker.total, 1)
