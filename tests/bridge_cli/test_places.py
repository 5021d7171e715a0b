"""DST and what may be there: another conversion, a link, somebody's folder, what a kill left."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.bridge_cli.checkpoints import DEADLINE, Running, fail, start, succeed, write_qwen3

_SMALL = ("--workers", 1, "--memory", "64MiB")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("source") / "qwen3", hidden_size=512)


def _partial(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.partial")


def _caught(arguments: tuple, destination: Path, reached) -> Running:
    """A conversion that is stopped at a point before its end; on a loaded machine try again."""
    for _ in range(50):
        process = start(*arguments)
        deadline = time.monotonic() + DEADLINE
        while process.running and not reached():
            assert time.monotonic() < deadline
        if process.running:
            process.send(signal.SIGSTOP)
            if reached() and _partial(destination).exists():
                return process
            process.send(signal.SIGCONT)
        process.wait()
        shutil.rmtree(destination)
    raise AssertionError("the conversion always ended before it could be stopped")


def _at_work(arguments: tuple, destination: Path) -> Running:
    journal = _partial(destination) / "journal.0.jsonl"
    return _caught(arguments, destination, lambda: journal.exists() and not destination.exists())


@pytest.mark.parametrize("options", [(), ("--resume",), ("--overwrite",)])
def test_two_at_once(source, tmp_path, options):
    there = tmp_path / "there"
    arguments = ("convert", source, there, *_SMALL, *options)
    first = _at_work(arguments, there)
    assert "another conversion" in fail(*arguments)
    first.send(signal.SIGCONT)
    assert first.wait().status == 0
    succeed("diff", source, there)


def test_what_came_into_being_meanwhile_stays(source, tmp_path):
    there = tmp_path / "there"
    arguments = ("convert", source, there, *_SMALL)
    process = _at_work(arguments, there)
    there.mkdir()
    (there / "mine").touch()
    process.send(signal.SIGCONT)
    done = process.wait()
    assert done.status == 2 and f"{there} exists" in done.error
    assert (there / "mine").exists()
    shutil.rmtree(there)
    succeed(*arguments, "--resume")
    succeed("diff", source, there)


def test_only_a_checkpoint_is_overwritten(source, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "thesis.txt").touch()
    error = fail("convert", source, there, "--overwrite")
    assert "no checkpoint" in error and (there / "thesis.txt").exists()
    (there / "thesis.txt").unlink()
    succeed("convert", source, there, "--overwrite")
    succeed("diff", source, there)


def test_a_link_is_replaced_not_followed(source, tmp_path):
    there = tmp_path / "there"
    there.symlink_to("nowhere")
    assert "link to nothing" in fail("convert", source, there)
    there.unlink()
    there.symlink_to(source)
    succeed("convert", source, there, "--overwrite")
    assert not there.is_symlink() and (source / "config.json").exists()
    assert not _partial(there).exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_after_the_end_leaves_nothing_to_do(source, tmp_path, overwrite):
    """The result is in place, and the killed conversion was only tidying up."""
    there = tmp_path / "there"
    arguments = ("convert", source, there, *_SMALL, "--overwrite", "--resume")

    def tidying() -> bool:
        return (there / "release").is_dir() and (_partial(there) / "conversion.json").exists()

    process = _caught(arguments, there, tidying)
    process.send(signal.SIGKILL)
    process.wait()
    options = () if overwrite else ("--overwrite",)
    text = succeed(*(a for a in arguments if a not in options))
    assert "by earlier runs" in text
    assert not _partial(there).exists()
    succeed("diff", source, there)


def test_a_kill_between_the_renames_gives_the_old_one_back(source, tmp_path):
    there = tmp_path / "there"
    succeed("convert", source, there, "--workers", 1)
    left = _partial(there)
    left.mkdir()
    there.rename(left / "old")
    assert "exists" in fail("convert", source, there)
    succeed("diff", source, there)


def test_a_damaged_note_is_told(source, tmp_path):
    there = tmp_path / "there"
    (_partial(there) / "result").mkdir(parents=True)
    (_partial(there) / "conversion.json").write_text("{}")
    assert "conversion.json is damaged" in fail("convert", source, there, "--resume")
    shutil.rmtree(_partial(there))
    succeed("convert", source, there, "--resume")


def test_a_name_that_is_no_text(source, tmp_path):
    there = tmp_path / os.fsdecode(b"name\xff")
    assert "name\\udcff: megatron" in succeed("convert", source, there)
    assert "name\\udcff" in succeed("inspect", there)


def test_nohup_is_respected(source, tmp_path):
    there = tmp_path / "there"
    arguments = ("convert", source, there, *_SMALL)
    process = start(*arguments, ignored=signal.SIGHUP)
    while process.running and not _partial(there).exists():
        time.sleep(0.001)
    process.send(signal.SIGHUP)
    assert process.wait().status == 0
