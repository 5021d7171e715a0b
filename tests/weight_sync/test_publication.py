"""Whole publications to real engines that break at every phase, and what is served afterwards."""

from __future__ import annotations

import json
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.weight_sync import server_checksum
from hybridflow.weight_sync.publication import PublishReport
from tests.tiny_models import make_model
from tests.weight_sync.publications import (
    DyingTrainer,
    Publications,
    Trainer,
    engines,
    serves,
)

PHASES = {
    "standby": ("open", "receive", "send", "prove", "load", "confirm", "resume"),
    "bucketed": ("open", "send", "load", "confirm", "resume"),
}
QUICK = {("standby", "load"), ("standby", "resume"), ("bucketed", "send")}
KILLED = [
    pytest.param(mode, phase, marks=[] if (mode, phase) in QUICK else [pytest.mark.slow])
    for mode, phases in PHASES.items()
    for phase in phases
]
MODES = pytest.mark.parametrize("mode", PHASES)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three sets of weights of one model; servers start with the first."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return [make_model(folder / f"{seed}", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def digests(checkpoints: list[Path]) -> list[str]:
    """What a server shows that holds them."""
    return [
        server_checksum(
            load_file(folder / "model.safetensors"),
            json.loads((folder / "config.json").read_text()),
        )
        for folder in checkpoints
    ]


@pytest.fixture(scope="module")
def pair(
    checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Publications]:
    """Two engines; each test leaves both serving."""
    with engines(checkpoints[0], checkpoints, tmp_path_factory.mktemp("sync")) as pair:
        yield pair


@pytest.fixture
def publish(pair: Publications, digests: list[str]) -> Iterator[Callable[..., Trainer]]:
    """Connects both sides by a mode and publishes the first checkpoint.

    Whatever the test does, a version of the third reaches both engines afterwards.
    """
    trainers: list[Trainer] = []

    def connect(mode: str, **settings) -> Trainer:
        trainers.append(pair.connect(mode, **settings))
        report = pair.publish(trainers[0].send)
        assert report.checksums == dict.fromkeys((0, 1), digests[0])
        assert report.bytes == 2 * pair.wiring.plan.bytes_before[-1]
        assert not (report.mended or report.failed or report.behind)
        pair.holds(trainers[0], 1)
        return trainers[0]

    yield connect
    (trainer,) = trainers
    pair.wait_for_senders(60.0)
    pair.holds(trainer, 2)
    report = pair.publish(trainer.send)
    assert not (report.mended or report.failed or report.behind)
    for engine in pair.engines:
        serves(engine, pair.version, digests[2])
    trainer.close()


def outcome(report: PublishReport) -> dict[str, set[int]]:
    """Numbers of engines by what became of them."""
    return {
        "proven": set(report.checksums) - set(report.failed),
        "mended": set(report.mended),
        "failed": set(report.failed),
        "behind": set(report.behind),
    }


def spoil(path: str | Path) -> None:
    """Change one byte."""
    with open(path, "r+b") as file:
        file.seek(77)
        byte = file.read(1)[0]
        file.seek(77)
        file.write(bytes([byte ^ 1]))


def slot(pair: Publications, number: int) -> str:
    """The slot that an engine opened last."""
    side: Any = pair.engines[number].worker._side
    return side._inbox._endpoint.slots[0]


@pytest.mark.parametrize(("mode", "phase"), KILLED)
def test_a_server_killed_at_each_phase(pair, publish, digests, mode: str, phase: str) -> None:
    """The others serve the version; a new server gets it from beside it or from the trainer."""
    trainer = publish(mode)
    healthy, victim = pair.engines
    if phase == "send":
        trainer.before[0] = victim.kill
    else:
        victim.before[phase] = victim.kill
    report = pair.publish(trainer.send)
    assert outcome(report)["failed"] == {1}
    assert outcome(report)["proven"] == {0} and not report.behind
    assert "ended with status 137" in report.failed[1].reason
    assert not victim.alive()
    serves(healthy, pair.version, digests[1])

    restored = victim.repaired(pair.version)
    if mode == "standby":
        assert restored.fault is None and restored.result == digests[1]
        assert victim.paused(), "it serves when it is told to"
        assert victim.worker.publication("resume", pair.version).fault is None
    else:
        assert restored.fault is not None and "keeps no version" in restored.fault.reason
        assert pair.again(trainer.send, victim).checksums == {1: digests[1]}
    serves(victim, pair.version, digests[1])


def test_a_byte_that_changes_in_a_slot(pair, publish, digests) -> None:
    """Once: it is sent again. Each time: that engine keeps the version before."""
    trainer = publish("standby")
    other, victim = pair.engines
    victim.before["prove"] = lambda: spoil(slot(pair, 1))
    report = pair.publish(trainer.send)
    assert outcome(report) == {"proven": {0, 1}, "mended": {1}, "failed": set(), "behind": set()}
    assert "WeightMismatch" in report.mended[1].reason and "was sent" in report.mended[1].reason
    serves(victim, pair.version, digests[1])

    def spoil_always() -> None:
        spoil(slot(pair, 1))
        victim.before["prove"] = spoil_always

    pair.holds(trainer, 2)
    victim.before["prove"] = spoil_always
    report = pair.publish(trainer.send)
    assert outcome(report) == {"proven": {0}, "mended": set(), "failed": set(), "behind": {1}}
    victim.before.clear()
    serves(other, pair.version, digests[2])
    serves(victim, pair.version - 1, digests[1])


@pytest.mark.slow
def test_a_server_that_holds_something_else(pair, publish, checkpoints, digests) -> None:
    """It differs after the load: the slot is copied once more."""
    trainer = publish("standby")
    victim = pair.engines[1]
    victim.before["confirm"] = lambda: victim.client.update_from_disk(checkpoints[2])
    report = pair.publish(trainer.send)
    assert outcome(report) == {"proven": {0, 1}, "mended": {1}, "failed": set(), "behind": set()}
    assert report.checksums == dict.fromkeys((0, 1), digests[1])
    assert "holds other weights than version" in report.mended[1].reason
    for engine in pair.engines:
        serves(engine, pair.version, digests[1])


def test_a_server_that_lost_half_of_what_came_in_buckets(
    pair, publish, checkpoints, digests
) -> None:
    trainer = publish("bucketed")
    victim = pair.engines[1]
    victim.before["confirm"] = lambda: victim.client.update_from_disk(checkpoints[2])
    report = pair.publish(trainer.send)
    assert outcome(report) == {"proven": {0, 1}, "mended": {1}, "failed": set(), "behind": set()}
    assert "was sent, the server holds" in report.mended[1].reason
    for engine in pair.engines:
        serves(engine, pair.version, digests[1])


@MODES
def test_ranks_that_say_what_another_sent(pair, publish, digests, mode: str) -> None:
    """Swapped ranks fit each other's shapes; digests tell."""
    trainer = publish(mode)

    def swapped(endpoints, version):
        first, second = trainer.send(endpoints, version)
        return [
            {link: second[link] for link in first},
            {link: first[link] for link in second},
        ]

    report = pair.publish(swapped)
    assert not report.checksums
    faults = report.behind if mode == "standby" else report.failed
    assert set(faults) == {0, 1} and "trainer 1 to engine 1" in faults[1].reason
    for engine in pair.engines:
        if mode == "standby":
            serves(engine, pair.version - 1, digests[0])
        else:
            assert engine.paused(), "its weights are not proven"


@pytest.mark.slow
@MODES
def test_another_dtype_ends_the_publication(pair, publish, digests, mode: str) -> None:
    trainer = publish(mode)
    pair.wait_for_senders(1.0)
    right = trainer.held
    index = min(right[1])
    trainer.held = [right[0], {**right[1], index: right[1][index].to(torch.bfloat16)}]
    with pytest.raises(ValueError, match=r"trainer rank 1 cannot publish: .* is torch.bfloat16"):
        pair.publish(trainer.send)
    unfinished(pair, digests[0], mode)


@pytest.mark.parametrize("mode", ["bucketed", pytest.param("standby", marks=pytest.mark.slow)])
def test_weights_that_are_no_numbers_end_the_publication(pair, publish, digests, mode) -> None:
    trainer = publish(mode)
    pair.wait_for_senders(1.0)
    right = trainer.held
    index = max(right[1])
    trainer.held = [right[0], {**right[1], index: right[1][index] / 0}]
    with pytest.raises(ArithmeticError, match=rf"version {pair.version + 1} is not published: "):
        pair.publish(trainer.send)
    unfinished(pair, digests[0], mode)


@MODES
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_trainer_that_fails(pair, publish, digests, mode: str, when: str) -> None:
    trainer = publish(mode)
    pair.wait_for_senders(1.0)

    def fails(endpoints, version):
        if when == "after":
            trainer.send(endpoints, version)
        raise RuntimeError("a rank of the trainer failed")

    with pytest.raises(RuntimeError, match="a rank of the trainer failed"):
        pair.publish(fails)
    unfinished(pair, digests[0], mode)


@pytest.mark.parametrize("mode", ["standby", pytest.param("bucketed", marks=pytest.mark.slow)])
def test_a_trainer_killed_as_it_sends(pair, publish, checkpoints, digests, mode: str) -> None:
    trainer = publish(mode)
    dying = DyingTrainer(trainer, pair.wiring, checkpoints[1], dies_at=9)
    with pytest.raises(RuntimeError, match="actor rank 1 died"):
        pair.publish(dying.send)
    unfinished(pair, digests[0], mode)


def unfinished(pair: Publications, before: str, mode: str) -> None:
    """The version was served by none: untouched servers go on, others stand still."""
    for engine in pair.engines:
        engine.phases[-1].result(120)  # a loader waits for its senders up to their deadline
        if mode == "standby":
            serves(engine, pair.version - 1, before)
        else:
            assert engine.paused()
            assert engine.client.model_info()["weight_version"] == str(pair.version - 1)


@pytest.mark.slow
def test_a_rank_that_is_late(pair, publish, digests) -> None:
    """Later than its deadline: the servers' loaders give up and it is sent again."""
    trainer = publish("bucketed")
    pair.wait_for_senders(1.0)

    def late() -> None:
        time.sleep(3.0)
        pair.wait_for_senders(60.0)

    trainer.before[1] = late
    report = pair.publish(trainer.send)
    assert outcome(report) == {"proven": {0, 1}, "mended": {0, 1}, "failed": set(), "behind": set()}
    assert "trainer 1 to engine 0" in report.mended[0].reason
    for engine in pair.engines:
        serves(engine, pair.version, digests[1])


@pytest.mark.slow
@MODES
def test_a_rank_ten_seconds_late_is_waited_for(pair, publish, digests, mode: str) -> None:
    trainer = publish(mode)
    trainer.before[1] = lambda: time.sleep(10.0)
    report = pair.publish(trainer.send)
    assert report.checksums == dict.fromkeys((0, 1), digests[1]) and not report.mended
    for engine in pair.engines:
        serves(engine, pair.version, digests[1])


@pytest.mark.slow
def test_a_session_left_open(pair, publish, digests) -> None:
    trainer = publish("standby")
    pair.engines[0].client.begin_weight_update()
    report = pair.publish(trainer.send)
    assert report.checksums == dict.fromkeys((0, 1), digests[1]) and not report.mended
    for engine in pair.engines:
        serves(engine, pair.version, digests[1])


def test_shared_memory_is_full(pair, publish, digests) -> None:
    """For one engine of two: it keeps what it serves."""
    trainer = publish("standby")
    healthy, victim = pair.engines
    opened = threading.Event()
    victim.worker.connect(pair.wiring, 1)  # its slots are to be made anew
    phase = healthy.phase

    def first(name, version, *args):
        future = phase(name, version, *args)
        future.add_done_callback(lambda _: opened.set())
        return future

    healthy.phase = first  # type: ignore[method-assign]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def no_room() -> None:
        assert opened.wait(60)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        if not victim.before:
            victim.before["open"] = no_room

    victim.before["open"] = no_room
    try:
        report = pair.publish(trainer.send)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        victim.before.clear()
        del healthy.phase
    assert outcome(report) == {"proven": {0}, "mended": set(), "failed": set(), "behind": {1}}
    assert "has no room for the slot of" in report.behind[1].reason
    serves(healthy, pair.version, digests[1])
    serves(victim, pair.version - 1, digests[0])


@pytest.mark.parametrize(
    ("mode", "when"),
    [("standby", "open"), ("standby", "send"), ("standby", "load"), ("bucketed", "open")],
)
def test_a_cleaner_of_shared_memory(pair, publish, digests, mode: str, when: str) -> None:
    """It takes an engine's folder while the run goes on: what is missing is made anew."""
    trainer = publish(mode)
    victim = pair.engines[1]

    def clean() -> None:
        shutil.rmtree(victim.worker._folder)

    if when == "send":
        trainer.before[0] = clean
    else:
        victim.before[when] = clean
    report = pair.publish(trainer.send)
    if when == "load":
        assert set(report.failed) == {1} and "removed slots" in report.failed[1].reason
        report = pair.again(trainer.send, victim)
    elif when == "send":
        first = report.mended[1].reason
        assert first.startswith("prove: SendFailed: engine 1: ")
        assert "cannot be opened: No such file" in first and ".." not in first
    else:
        assert not report.mended
    assert report.checksums[1] == digests[1]
    for engine in pair.engines:
        serves(engine, pair.version, digests[1])
