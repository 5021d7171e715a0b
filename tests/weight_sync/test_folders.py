"""Folders of one process: of whom a later run removes them, and of whom it never does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridflow import owned
from hybridflow.weight_sync.folders import PREFIX, own_folder

_OWNER = """
import sys, pathlib
from hybridflow import owned
print(owned.make(pathlib.Path(sys.argv[1]), sys.argv[2]), flush=True)
sys.stdin.read()
"""


@contextmanager
def another_owner(parent: Path, *through: str) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A process that lives and owns a folder of ``parent``; ``through`` what it is started by."""
    command = [*through, sys.executable, "-c", _OWNER, str(parent), PREFIX]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            made = process.stdout.readline().strip()
            if not made and through:
                assert process.stderr is not None
                pytest.skip(f"no namespaces here: {process.stderr.readline().strip()}")
            yield process, Path(made)
        finally:
            process.kill()


def test_a_folder_goes_when_its_owner_is_killed_and_not_before(tmp_path: Path) -> None:
    with another_owner(tmp_path) as (process, theirs):
        (theirs / "engine0-rank0-a.slot").write_bytes(bytes(8))
        ours = own_folder(tmp_path)
        assert theirs.is_dir() and ours.is_dir()
        process.kill()
        process.wait()
        owned.remove_abandoned(tmp_path, PREFIX)
    assert not theirs.exists() and ours.is_dir()
    owned.remove(ours)
    owned.remove(ours)
    assert not list(tmp_path.iterdir())


def test_what_an_error_left_goes_as_its_process_exits(tmp_path: Path) -> None:
    with another_owner(tmp_path) as (process, theirs):
        assert theirs.is_dir()
        process.communicate()  # its input ends, and so does it
    assert process.returncode == 0 and not theirs.exists()


def test_a_run_in_another_container_takes_nothing(tmp_path: Path) -> None:
    """Processes that do not see each other, as in containers that share /dev/shm."""
    ours = own_folder(tmp_path)
    with another_owner(tmp_path, "unshare", "--pid", "--fork", "--mount-proc") as (_, theirs):
        owned.remove_abandoned(tmp_path, PREFIX)
        assert ours.is_dir() and theirs.is_dir()
    owned.remove(ours)


@pytest.mark.parametrize("told", ["", "another start\ngpu-9999999\n1\n", "torn"])
def test_a_folder_that_may_be_another_machines_stays(tmp_path: Path, told: str) -> None:
    """On a disk that machines share, locks may tell of this one alone."""
    other = tmp_path / f"{PREFIX}abc"
    other.mkdir()
    (other / owned.LOCK).write_text(told)
    (tmp_path / f"{PREFIX}without").mkdir()
    owned.remove_abandoned(tmp_path, PREFIX)
    assert len(list(tmp_path.iterdir())) == 2


def test_this_machines_folders_of_before_its_last_start_go(tmp_path: Path) -> None:
    old = tmp_path / f"{PREFIX}abc"
    (old / "v1").mkdir(parents=True)
    (old / owned.LOCK).write_text(f"another start\n{os.uname().nodename}\n1\n")
    (tmp_path / f"{PREFIX}link").symlink_to(old)
    owned.remove_abandoned(tmp_path, PREFIX)
    assert not old.exists() and (tmp_path / f"{PREFIX}link").is_symlink()


@pytest.mark.parametrize("lost", ["everything", "the lock"])
def test_what_a_cleaner_removed_is_made_anew_with_its_lock(tmp_path: Path, lost: str) -> None:
    ours = own_folder(tmp_path)
    if lost == "everything":
        (ours / owned.LOCK).unlink()
        ours.rmdir()
    else:
        (ours / owned.LOCK).unlink()
    owned.keep(ours)
    owned.keep(ours)
    assert ours.stat().st_mode & 0o777 == 0o700
    with another_owner(tmp_path):  # removes what nobody holds
        assert ours.is_dir()
    owned.remove(ours)


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    ours = own_folder(tmp_path)
    (ours / owned.LOCK).unlink()
    ours.rmdir()
    ours.symlink_to(tmp_path)
    with pytest.raises(ValueError, match="was removed, and something"):
        owned.keep(ours)
