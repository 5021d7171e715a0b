"""Groups on a real Ray, and the in-process twin with the same results."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster import (
    ClusterError,
    GroupClosed,
    LocalSession,
    Pool,
    RaySession,
    Session,
    WorkerError,
    WorkerGroup,
    processes,
)
from hybridflow.cluster.ray_session import GROUPS_PER_SLOT
from hybridflow.recipe.axes import Axis
from megatron_bridge.layout import ParallelLayout
from tests.cluster.workers import Besides, Sore, Worker


@pytest.fixture(scope="module")
def pair(session: RaySession, pool: Pool) -> WorkerGroup:
    """Two data-parallel ranks that met over gloo."""
    group = session.group("pair", Worker, ParallelLayout(dp=2), pool, {"offset": 1})
    return group.wait_until_started()


@pytest.fixture(scope="module")
def local() -> Iterator[LocalSession]:
    with LocalSession() as session:
        yield session


def test_ranks_meet_over_the_rendezvous(pair: WorkerGroup, session: RaySession) -> None:
    assert pair.run(Worker.total, 5) == [11, 11]
    assert len(processes.marked(f"{session.mark}pair/")) == 2, "the mark finds the ranks"


def test_a_batch_goes_to_the_ranks_and_back(pair: WorkerGroup, batch: Batch) -> None:
    result = pair.run(Worker.double, batch, scale=3)
    assert result["doubled"].values.tolist() == (batch["responses"].values * 3 + 1).tolist()
    assert result.select(list(batch.fields)).equals(batch)
    assert pair.run(Worker.rows, batch) == {"rank": 0, "samples": 4}


def test_a_group_of_one_process_gives_what_ray_gives(
    pair: WorkerGroup, local: LocalSession, batch: Batch
) -> None:
    pool = local.pool("devices", 1)
    alone = local.group("alone", Worker, ParallelLayout(), pool, {"offset": 1})
    assert alone.run(Worker.double, batch).equals(pair.run(Worker.double, batch))
    assert alone.run(Worker.total, 5) == [5]


def test_big_fields_are_read_from_the_object_store_without_a_copy(pair: WorkerGroup) -> None:
    lengths = [200_000, 0, 7, 100_000]
    responses = Ragged.from_rows([torch.zeros(length, dtype=torch.int32) for length in lengths])
    batch = Batch(
        {
            "responses": responses,
            "logprobs": responses.with_values(responses.values.to(torch.bfloat16)),
            "rewards": torch.zeros(4, 50_000),
        },
        {"responses": Axis.TOKENS, "logprobs": Axis.TOKENS, "rewards": Axis.SAMPLES},
        prompts=4,
    )
    for files in pair.run(Worker.memory_of, batch):
        assert all("plasma" in file for file in files), files


def test_workers_take_over_the_drivers_surroundings(pair: WorkerGroup) -> None:
    first, second = pair.run(Worker.describe)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["pid"] != second["pid"]
    assert first["directory"] == str(Path.cwd())
    assert first["threads"] == 1
    assert first["variables"] == ["1", "1"]


def test_groups_share_a_pool_and_set_their_threads(session: RaySession, pool: Pool) -> None:
    group = session.group("guest", Worker, 2, pool, {"join": False}, threads=2, first_slot=1)
    assert [place["variables"] for place in group.run(Worker.describe)] == [["2", "2"]] * 2
    assert {group.run(Worker.who) for _ in range(2)} == {0, 1}
    assert torch.equal(group.run(Worker.big, 300_000), torch.arange(300_000))
    with pytest.raises(WorkerError, match=r"guest rank \d: .*generator"):
        group.run(Worker.unpicklable)


@pytest.fixture(params=["ray", "local"])
def either(request: pytest.FixtureRequest, local: LocalSession) -> Session:
    return request.getfixturevalue("session") if request.param == "ray" else local


def test_calls_run_in_order_and_close_ends_everything(either: Session) -> None:
    group = either.group("single", Sore, ParallelLayout())
    futures = [group.call(Sore.note, n, delay=0.05 * (n == 0)) for n in range(5)]
    assert futures[-1].result() == [[0, 1, 2, 3, 4]]
    assert all(future.result()[0][:n] == list(range(n)) for n, future in enumerate(futures))
    (child,) = group.run(Sore.spawn)
    (place,) = group.run(Sore.describe)
    with pytest.raises(WorkerError, match="rank 0: OSError in close: cannot stop the server"):
        group.close()
    group.close()
    with pytest.raises(GroupClosed, match="is closed"):
        group.run(Sore.note, 5)
    if isinstance(either, LocalSession):
        os.kill(child, signal.SIGKILL)
    else:
        assert not _lives(child)
        assert not _lives(int(str(place["pid"])))


def test_a_name_is_free_again_once_its_group_is_over(either: Session) -> None:
    group = either.group("again", Worker, 1)
    with pytest.raises(ValueError, match="a group 'again' already"):
        either.group("again", Worker, 1)
    with pytest.raises(WorkerError, match="no such token"):
        group.run(Worker.hang_unless, 0, "raise")
    assert group.over
    second = either.group("again", Worker, 1)
    assert second.run(Worker.note, 3) == [[3]] and not second.over
    second.close()
    assert either.group("again", Worker, 1).run(Worker.note, 4) == [[4]]


def test_no_group_starts_once_its_session_is_closed() -> None:
    session = LocalSession()
    session.close()
    with pytest.raises(ClusterError, match="group 'late' cannot start: its session is closed"):
        session.group("late", Worker, 1)


@pytest.mark.slow
def test_a_slot_holds_so_many_groups_and_is_given_back(session: RaySession, pool: Pool) -> None:
    groups = [
        session.group(f"seat-{turn}", Worker, 1, pool, first_slot=2)
        for turn in range(GROUPS_PER_SLOT)
    ]
    with pytest.raises(ValueError, match="slot 2 of pool 'devices' holds 8 groups"):
        session.group("one-more", Worker, 1, pool, first_slot=2)
    groups[0].run(Worker.who)
    groups[0].close()
    assert session.group("one-more", Worker, 1, pool, first_slot=2).run(Worker.who) == 0
    for group in groups[1:]:
        group.close()


def test_calls_that_cannot_be_are_refused(session: RaySession, pair: WorkerGroup) -> None:
    with pytest.raises(ValueError, match=r"undeclared declares no transfer"):
        pair.call(Worker.undeclared)
    with pytest.raises(ValueError, match=r"Sore.close is no method of Worker"):
        pair.call(Sore.close)
    with pytest.raises(ValueError, match="a group 'pair' already"):
        session.group("pair", Worker, 1)


def test_pools_and_groups_that_do_not_fit_are_refused(
    session: RaySession, local: LocalSession, pool: Pool
) -> None:
    with pytest.raises(ValueError, match="pool 'large' of 4 slots: 2 of the cluster's 5 are left"):
        session.pool("large", 4)
    with pytest.raises(ValueError, match="a pool 'devices' already"):
        session.pool("devices", 1)
    with pytest.raises(ValueError, match="4 ranks do not fit pool 'devices' of 3 slots"):
        session.group("four", Worker, 4, pool)
    for either, place in ((session, pool), (local, local.pool("three", 3))):
        with pytest.raises(ValueError, match="do not fit pool '.*' of 3 slots from slot 2 on"):
            either.group("far", Worker, 2, place, {"join": False}, first_slot=2)
    with pytest.raises(ValueError, match="one rank per role, the layout has 2"):
        local.group("two", Worker, ParallelLayout(tp=2))
    with pytest.raises(ValueError, match="nodes=2 needs the address"):
        RaySession(nodes=2)
    with pytest.raises(ValueError, match="must be >= 1"):
        RaySession(devices_per_node=0)
    with pytest.raises(ValueError, match="uses Ray already"):
        RaySession()


def _lives(pid: int, patience: float = 30.0) -> bool:
    """Whether the process is still there after ``patience`` seconds; a killed one takes a moment
    to go."""
    deadline = time.monotonic() + patience
    while _runs(pid):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("kind", ["ray", "local"])
def test_a_call_beside_others_does_not_wait_for_them(kind: str, session: RaySession) -> None:
    """Nor do those after it; among themselves they keep their order."""
    with LocalSession() as local:
        home = session if kind == "ray" else local
        group = home.group("beside", Besides, 1).wait_until_started()
        waiting = group.call(Besides.wait_for_release, 120.0)
        turns = [group.call(Besides.take_turn, turn, timeout=60) for turn in range(3)]
        assert turns[-1].result() == [0, 1, 2]
        assert not waiting.done()
        group.run(Besides.release, timeout=60)
        assert waiting.result(timeout=60) == "released"
        group.close()
