"""The command line beyond recipes: what is missing, and where the output goes."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow import cli
from hybridflow.commands import check


def test_overrides_are_not_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train"])
    assert "arguments are required: recipe\n" in capsys.readouterr().err


def test_a_run_goes_on_in_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "recipe.yaml", "--resume", "--resume-if-any"])
    assert "not allowed with argument --resume" in capsys.readouterr().err


def test_a_reader_who_has_enough_is_no_error(workspace: Path) -> None:
    command = [sys.executable, "-m", "hybridflow.cli", "explain", "recipe.yaml"]
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$@" 2>errors | true', "sh", *command], cwd=workspace
    )
    assert process.wait(60) == 0
    assert (workspace / "errors").read_text() == ""


def test_an_error_of_the_system_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(args: object) -> int:
        raise OSError(28, "No space left on device", "runs/a/metrics.jsonl")

    monkeypatch.setattr(check, "run", full)
    assert cli.main(["check", "recipe.yaml"]) == 1
    error = capsys.readouterr().err
    assert error.endswith("No space left on device: 'runs/a/metrics.jsonl'\n")
    assert error.count("\n") == 1
