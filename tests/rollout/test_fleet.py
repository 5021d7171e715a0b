"""Two real engines behind one call: who answers, and what failures do to the answers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import psutil
import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster import LocalSession
from hybridflow.rollout.background import in_background
from hybridflow.rollout.engines import (
    EngineFault,
    EngineState,
    FleetClosed,
    FleetError,
    GenerateRequest,
    RequestRefused,
)
from hybridflow.rollout.fleet import Fleet
from hybridflow.rollout.roster import MOST_REPAIRS
from hybridflow.workers.rollout_engine import RolloutEngine
from tests.rollout.fleets import (
    GREEDY,
    SEEDED,
    LocalFleet,
    local_fleet,
    prompts_of,
    wait_for,
)

BATCH = prompts_of(7)


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[LocalFleet]:
    """Two engines; each test but the last of them leaves both answering."""
    with local_fleet(tiny_model, 2) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def expected(pair: LocalFleet) -> Batch:
    """What one engine says to all prompts."""
    request = GenerateRequest("alone", BATCH, tuple(range(BATCH.prompts)), 3, SEEDED)
    answer = pair.engines[0].generate(request).result()
    assert isinstance(answer, Batch), answer
    return answer


def same(answer: Batch, expected: Batch) -> None:
    """Each sample once and in its place, whoever answered it."""
    assert answer["responses"].equals(expected["responses"])
    torch.testing.assert_close(
        answer["rollout_logprobs"].values, expected["rollout_logprobs"].values
    )
    assert answer["token_versions"].values.tolist() == [0] * len(answer["responses"].values)


def states(fleet: Fleet) -> list[str]:
    return [str(state) for state in fleet.states().values()]


def test_a_share_for_each_gives_what_one_engine_gives(pair: LocalFleet, expected: Batch) -> None:
    same(pair.fleet().generate(BATCH, 3, SEEDED), expected)


def test_one_engine_gets_the_whole_call_as_it_is(pair: LocalFleet, expected: Batch) -> None:
    fleet = pair.fleet()
    fleet.quarantine("rollout-1", EngineFault("taken out by the test"))
    assert fleet.generate(BATCH, 3, SEEDED).equals(expected)
    assert fleet.generate(BATCH.slice(0, 0), 3, SEEDED).samples == 0


def stopped_in_a_call(
    pair: LocalFleet, fleet: Fleet[RolloutEngine], stopped: list[int]
) -> Future[Batch]:
    """A call that cannot end: the servers of some engines are stopped while they hold a share."""
    for index in stopped:
        pair.server(index).send_signal(signal.SIGSTOP)
    call = in_background("call", lambda: fleet.generate(BATCH, 3, SEEDED))
    wait_for("the requests", lambda: fleet.open_requests() == len(stopped))
    return call


def test_a_server_killed_in_a_call(pair: LocalFleet, expected: Batch) -> None:
    fleet = pair.fleet()
    rows = [[number] * 5000 for number in range(2, 9)]
    too_long = BATCH.with_field(
        "prompts", BATCH.axes["prompts"], Ragged.from_rows(rows, torch.int64)
    )
    with pytest.raises(RequestRefused, match="over the model's 4096"):
        fleet.generate(too_long, 1, GREEDY)
    assert states(fleet) == ["serving"] * 2, "a wrong request says nothing of its engine"

    server = pair.server(1)
    call = stopped_in_a_call(pair, fleet, [1])
    server.kill()
    same(call.result(timeout=120), expected)
    assert states(fleet) == ["serving", "quarantined"]
    (event,) = pair.events
    assert (event.kind, event.engine) == ("quarantine", "rollout-1")
    assert "ended with status 137" in event.text
    assert "over the model's 4096" in event.log, "the end of its log is at hand"

    fleet.repair()
    assert states(fleet) == ["serving"] * 2
    assert [event.kind for event in pair.events] == ["quarantine", "repair", "readmission"]
    same(fleet.generate(BATCH, 3, SEEDED), expected)


@pytest.mark.slow
def test_all_servers_killed_are_repaired_once(pair: LocalFleet, expected: Batch) -> None:
    fleet = pair.fleet()
    servers = [pair.server(0), pair.server(1)]
    call = stopped_in_a_call(pair, fleet, [0, 1])
    for server in servers:
        server.kill()
    same(call.result(timeout=120), expected)
    assert states(fleet) == ["serving"] * 2


def test_a_late_answer_is_dropped(pair: LocalFleet, expected: Batch) -> None:
    """Past the deadline another engine answers; the first one's answer comes all the same."""
    fleet = pair.fleet(request_seconds=5.0)
    server = pair.server(1)
    call = stopped_in_a_call(pair, fleet, [1])
    wait_for("the quarantine", lambda: states(fleet)[1] == "quarantined")
    server.send_signal(signal.SIGCONT)
    same(call.result(timeout=120), expected)
    assert pair.engines[1].health().healthy, "its late answer has come"
    assert "no answer to" in pair.events[0].text and "within 5 s" in pair.events[0].text
    assert fleet.open_requests() == 0


def test_a_quarantine_from_outside_takes_its_requests_away(
    pair: LocalFleet, expected: Batch
) -> None:
    """Weights in doubt, say: what the engine samples from them must not count."""
    fleet = pair.fleet()
    server = pair.server(0)
    call = stopped_in_a_call(pair, fleet, [0])
    fleet.quarantine("rollout-0", EngineFault("its weights are in doubt"))
    same(call.result(timeout=120), expected)
    server.send_signal(signal.SIGCONT)
    assert pair.engines[0].health().healthy


def test_an_engine_comes_back_with_the_served_version_alone(pair: LocalFleet) -> None:
    fleet = pair.fleet(lambda engine: 7, version=8)
    fleet.quarantine("rollout-0", EngineFault("another checksum"))
    for attempt in range(MOST_REPAIRS):
        assert fleet.states()["rollout-0"] is EngineState.QUARANTINED, attempt
        fleet.repair()
    assert states(fleet) == ["lost", "serving"]
    assert "came back with version 7; version 8 is served" in pair.events[-1].text
    begun = len(pair.events)
    fleet.repair()
    assert len(pair.events) == begun, "a lost engine is left alone"
    fleet.version = 7
    fleet.quarantine("rollout-1", EngineFault("another checksum"))
    fleet.require_engine()
    assert states(fleet) == ["lost", "serving"]


def test_a_closed_fleet_takes_and_answers_nothing(pair: LocalFleet) -> None:
    fleet = pair.fleet()
    server = pair.server(0)
    call = stopped_in_a_call(pair, fleet, [0])
    fleet.close()
    with pytest.raises(FleetClosed, match="was closed"):
        call.result(timeout=120)
    server.send_signal(signal.SIGCONT)
    with pytest.raises(FleetClosed, match="is closed"):
        fleet.generate(BATCH, 1, GREEDY)


def test_without_a_repair_the_error_holds_every_reason_and_log(pair: LocalFleet) -> None:
    def fails(engine: RolloutEngine) -> int:
        raise RuntimeError(f"no weights for {engine.name}")

    fleet = pair.fleet(fails)
    for index in (0, 1):
        pair.server(index).kill()
    with pytest.raises(FleetError, match="no rollout engine is left") as caught:
        fleet.generate(BATCH, 3, SEEDED)
    for name in ("rollout-0", "rollout-1"):
        assert f"{name} (quarantined): repair 1 failed: no weights for {name}" in str(caught.value)
    assert str(caught.value).count("ended with status 137") == 2
    assert [event.kind for event in pair.events].count("repair") == 2


@pytest.mark.slow
def test_engines_start_side_by_side_and_a_hanging_one_is_found(tiny_model: Path) -> None:
    """One server is stopped before it is healthy; the other starts all the same. Then a server
    hangs in a request: /health tells, a restart ends it, and nothing is left of any of them."""
    here = psutil.Process()
    before = set(here.children(recursive=True))

    def servers() -> list[psutil.Process]:
        found = set(here.children(recursive=True)) - before
        return [p for p in found if p.cmdline()[1:3] == ["-m", "hybridflow.rollout.local"]]

    with LocalSession() as session:
        group = LocalFleet(session, tiny_model, ["first", "second"], hang=4.0)
        wait_for("both servers", lambda: len(servers()) == 2)
        stopped = servers()[0]
        stopped.send_signal(signal.SIGSTOP)
        starts = [in_background(e.name, e.wait_until_started) for e in group.engines]
        assert len(wait(starts, 120, FIRST_COMPLETED).done) >= 1
        stopped.send_signal(signal.SIGCONT)
        for start in starts:
            start.result(timeout=120)

        fleet = group.fleet()
        call = stopped_in_a_call(group, fleet, [1])
        assert call.result(timeout=120).samples == 21
        assert "hangs: /health has had no answer for 4 s" in group.events[0].text
        fleet.repair()
        assert states(fleet) == ["serving"] * 2
        everything = set(here.children(recursive=True)) - before
    assert psutil.wait_procs(everything, timeout=60)[1] == []
