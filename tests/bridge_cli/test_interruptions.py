"""Conversions that are killed, stopped or run into a wall: DST is complete or absent, and
`--resume` ends as if nothing had happened."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.bridge_cli.checkpoints import (
    DEADLINE,
    Done,
    Running,
    start,
    succeed,
    write_qwen3,
)

# The least memory makes the smallest units, and so the most of them.
_SMALL = ("--workers", 2, "--memory", "64MiB")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """About 40 MB: some dozens of the smallest units."""
    return write_qwen3(tmp_path_factory.mktemp("source") / "qwen3", hidden_size=512)


def _partial(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.partial")


def _batches(destination: Path) -> int:
    """Batches in the journal; -1 before there is one."""
    try:
        return (_partial(destination) / "journal.0.jsonl").read_bytes().count(b'"done"')
    except FileNotFoundError:
        return -1


def _cut_short(arguments: tuple, destination: Path, batches: int, hit) -> Done:
    """Start a conversion and `hit` it once so many batches are done.

    On a loaded machine the conversion may be over first; then it is started again.
    """
    for _ in range(20):
        process = start(*arguments)
        deadline = time.monotonic() + DEADLINE
        while process.running and _batches(destination) < batches:
            assert time.monotonic() < deadline
        if process.running:
            hit(process)
        done = process.wait()
        if not destination.exists():
            return done
        shutil.rmtree(destination)
    raise AssertionError("the conversion always ended before it could be hit")


def _kill_parent(process: Running) -> None:
    process.send(signal.SIGKILL)


def _kill_worker(process: Running) -> None:
    os.kill(process.workers()[0], signal.SIGKILL)


@pytest.mark.parametrize("batches", [0, 1, 4])
def test_a_killed_conversion_is_resumed(source, tmp_path, batches):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    succeed("convert", source, whole, "--parallel", "tp=2,pp=2", *_SMALL)
    arguments = ("convert", source, cut, "--parallel", "tp=2,pp=2", *_SMALL)
    assert _cut_short(arguments, cut, batches, _kill_parent).status == -signal.SIGKILL
    text = succeed(*arguments, "--resume")
    assert ("by earlier runs" in text) == (batches > 0)
    succeed("diff", whole, cut)
    assert not _partial(cut).exists()


def test_it_may_be_killed_again_and_again(source, tmp_path):
    cut = tmp_path / "cut"
    arguments = ("convert", source, cut, *_SMALL, "--resume")
    for batches in (1, 2, 3):
        _cut_short(arguments, cut, batches, _kill_parent)
    succeed(*arguments)
    succeed("diff", source, cut)
