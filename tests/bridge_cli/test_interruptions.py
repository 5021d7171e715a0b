"""Conversions that are killed, stopped or run into a wall: DST is complete or absent, and
`--resume` ends as if nothing had happened."""

import contextlib
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.bridge_cli.checkpoints import (
    DEADLINE,
    Done,
    Running,
    command,
    fail,
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


def _cut_short(
    arguments: tuple, destination: Path, batches: int, hit, prepare=lambda: None
) -> Done:
    """Start a conversion and `hit` it once so many batches are done.

    On a loaded machine the conversion may be over first; then it is started again.
    """
    for _ in range(20):
        prepare()
        process = start(*arguments)
        deadline = time.monotonic() + DEADLINE
        while process.running and _batches(destination) < batches:
            assert time.monotonic() < deadline
        if process.running:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended just now
                hit(process)
        done = process.wait()
        if not destination.exists():
            return done
        shutil.rmtree(destination)
    raise AssertionError("the conversion always ended before it could be hit")


def _kill_parent(process: Running) -> None:
    process.send(signal.SIGKILL)


def _kill_worker(process: Running) -> None:
    for pid in process.workers()[:1]:
        os.kill(pid, signal.SIGKILL)


def _terminate(process: Running) -> None:
    process.send(signal.SIGTERM)


def _hang_up(process: Running) -> None:
    """A terminal that closes tells all."""
    for pid in (*process.workers(), process.pid):
        os.kill(pid, signal.SIGHUP)


def _end_all(process: Running) -> None:
    for pid in (*process.workers(), process.pid):
        os.kill(pid, signal.SIGTERM)


def _interrupt(process: Running) -> None:
    process.send(signal.SIGINT)


@pytest.mark.parametrize("batches", [0, 1, 4])
def test_a_killed_conversion_is_resumed(source, tmp_path, batches):
    cut = tmp_path / "cut"
    arguments = ("convert", source, cut, "--parallel", "tp=2,pp=2", *_SMALL)
    assert _cut_short(arguments, cut, batches, _kill_parent).status == -signal.SIGKILL
    text = succeed(*arguments, "--resume")
    assert ("by earlier runs" in text) == (batches > 0)
    succeed("diff", source, cut)
    assert not _partial(cut).exists()


def test_it_may_be_killed_again_and_again(source, tmp_path):
    cut = tmp_path / "cut"
    arguments = ("convert", source, cut, "--to", "huggingface", *_SMALL, "--resume")
    for batches in (1, 2):
        _cut_short(arguments, cut, batches, _kill_parent)
    succeed(*arguments)
    succeed("diff", source, cut)


@pytest.mark.parametrize(
    ("hit", "status", "said"),
    [
        (_kill_worker, 1, "was killed by SIGKILL while it converted"),
        (_terminate, 143, "ended by SIGTERM"),
        (_end_all, 143, "ended by SIGTERM"),
        (_hang_up, 129, "ended by SIGHUP"),
        (_interrupt, 130, "interrupted"),
    ],
)
def test_what_ends_it_is_one_line_and_can_be_resumed(source, tmp_path, hit, status, said):
    cut = tmp_path / "cut"
    arguments = ("convert", source, cut, *_SMALL)
    done = _cut_short(arguments, cut, 1, hit)
    assert done.status == status, done
    assert said in done.error
    assert len(done.error.strip().splitlines()) == 1
    assert "an earlier conversion" in fail(*arguments)
    succeed(*arguments, "--resume", "--workers", 1)
    succeed("diff", source, cut)


def test_only_the_same_conversion_is_resumed(source, tmp_path):
    copy, cut = shutil.copytree(source, tmp_path / "source"), tmp_path / "cut"
    arguments = ("convert", copy, cut, *_SMALL)
    _cut_short(arguments, cut, 1, _kill_parent)
    error = fail(*arguments, "--resume", "--parallel", "tp=2", "--dtype", "bfloat16")
    assert "--parallel was None and is tp=2" in error
    assert "--dtype was None and is bfloat16" in error
    changed = copy / "model-00001-of-00003.safetensors"
    os.utime(changed, (1, 1))
    assert f"{changed} changed" in fail(*arguments, "--resume")
    shutil.rmtree(_partial(cut))
    succeed(*arguments)


def test_a_source_that_changes_meanwhile_is_not_put_in_place(source, tmp_path):
    copy, cut = tmp_path / "source", tmp_path / "cut"

    def fresh() -> None:
        shutil.copytree(source, copy, dirs_exist_ok=True)

    def change(process: Running) -> None:
        os.utime(copy / "model-00002-of-00003.safetensors", (1, 1))

    done = _cut_short(("convert", copy, cut, *_SMALL), cut, 1, change, fresh)
    assert done.status == 2
    assert "changed during the conversion" in done.error


def test_a_source_that_is_cut_off_meanwhile_is_an_error(source, tmp_path):
    copy, cut = tmp_path / "source", tmp_path / "cut"

    def fresh() -> None:
        shutil.copytree(source, copy, dirs_exist_ok=True)

    def cut_off(process: Running) -> None:
        for file in copy.glob("*.safetensors"):
            os.truncate(file, 4096)

    done = _cut_short(("convert", copy, cut, *_SMALL), cut, 1, cut_off, fresh)
    assert done.status in (1, 2), done
    assert "became shorter" in done.error or "changed during" in done.error
    assert "Traceback" not in done.error


@pytest.mark.parametrize("to", ["megatron", "huggingface"])
def test_a_file_that_cannot_grow_is_one_line_and_can_be_resumed(source, tmp_path, to):
    """What a full disk does, by a limit that binds every user."""
    cut = tmp_path / "cut"
    arguments = ("convert", source, cut, "--to", to, "--workers", 1, "--memory", "64MiB")
    done = command(*arguments, limits={resource.RLIMIT_FSIZE: 6 * 2**20})
    assert done.status in (1, 2), done
    assert str(tmp_path) in done.error
    assert len(done.error.strip().splitlines()) == 1, done.error
    assert not cut.exists()
    succeed(*arguments, *(["--resume"] if _partial(cut).exists() else []))
    succeed("diff", source, cut)
