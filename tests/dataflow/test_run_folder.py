"""Checkpoints are whole or absent, the newest are kept, and another recipe is refused."""

import json
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridflow.dataflow.launch import _ending, _require_steps_left
from hybridflow.dataflow.run_folder import Checkpoint, Progress, RunFolder
from hybridflow.dataflow.trainer import Records
from hybridflow.monitor import Console, RunWriter, read_events


def progress(step: int) -> Progress:
    return Progress(0, step, step, stream_position=8 * step, weight_version=step)


def create(path: Path, recipe: str) -> RunFolder:
    folder = RunFolder(path)
    folder.set_aside()
    with folder.held():
        folder.write_recipe(recipe)
    return folder


def save(folder: RunFolder, step: int, keep: int = 2) -> None:
    partial = folder.begin_checkpoint(progress(step))
    (partial / "weights").write_text(str(step))
    folder.finish_checkpoint(partial, progress(step), keep)


def test_newest_checkpoints_are_kept(tmp_path) -> None:
    folder = create(tmp_path / "run", "name: a\n")
    for step in (2, 4, 10):
        save(folder, step)
    assert [c.progress.step for c in folder.checkpoints()] == [4, 10]
    assert (folder.checkpoints()[-1].folder / "weights").read_text() == "10"
    assert folder.checkpoints()[-1].progress == progress(10)


def test_a_damaged_old_checkpoint_goes_as_others_do(tmp_path) -> None:
    folder = create(tmp_path / "run", "name: a\n")
    save(folder, 2)
    (folder.checkpoints_path / "step-000002" / "state.json").write_text("")
    for step in (4, 10):
        save(folder, step)
    assert [c.progress.step for c in folder.checkpoints()] == [4, 10]
    save(folder, 1_000_000)
    assert [c.progress.step for c in folder.checkpoints()] == [10, 1_000_000]


def test_the_newest_version_is_kept(tmp_path) -> None:
    folder = create(tmp_path / "run", "name: a\n")
    assert folder.noted_version() == 0
    folder.note_version(7)
    folder.note_version(8)
    assert RunFolder(folder.path).noted_version() == 8
    (folder.path / "weight_version").write_text("")
    with pytest.raises(ValueError, match=r"weight_version is damaged: it holds ''.*metrics.jsonl"):
        folder.noted_version()


def test_an_unfinished_checkpoint_does_not_count(tmp_path) -> None:
    folder = create(tmp_path / "run", "name: a\n")
    save(folder, 1)
    partial = folder.begin_checkpoint(progress(2))
    (partial / "weights").write_text("half")
    assert [c.progress.step for c in folder.checkpoints()] == [1]
    (partial / "state.json").write_text(json.dumps(asdict(progress(2))))
    assert [c.progress.step for c in folder.checkpoints()] == [1], "not before it has its name"
    folder.remove_partial()
    assert not partial.exists()


BELOW = json.dumps(asdict(progress(1)) | {"step": -1})


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 1}', "null", BELOW])
def test_a_damaged_state_is_named(tmp_path, text: str) -> None:
    folder = create(tmp_path / "run", "name: a\n")
    save(folder, 1)
    (folder.checkpoints_path / "step-000001" / "state.json").write_text(text)
    with pytest.raises(ValueError, match="step-000001/state.json is damaged: .*; restore it, or"):
        folder.checkpoints()


def test_an_earlier_run_is_kept_aside(tmp_path) -> None:
    for name in ("first", "second", "third"):
        create(tmp_path / "run", f"name: {name}\n")
    names = {p.name: (p / "recipe.yaml").read_text() for p in tmp_path.iterdir()}
    assert names == {
        "run": "name: third\n",
        "run.1": "name: first\n",
        "run.2": "name: second\n",
    }


def test_a_folder_that_is_no_run_is_left_alone(tmp_path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    with pytest.raises(ValueError, match="holds something else than a run; name a folder that"):
        create(tmp_path / "thesis", "name: a\n")
    assert [p.name for p in tmp_path.rglob("*")] == ["thesis", "chapter.tex"]


def test_two_runs_do_not_share_a_folder(tmp_path) -> None:
    folder = create(tmp_path / "run", "name: a\n")
    with folder.held():
        with pytest.raises(ValueError, match="another run is going on in .*run; wait for its end"):
            create(tmp_path / "run", "name: b\n")
        with pytest.raises(ValueError, match="another run is going on"), folder.held():
            pass
    assert (folder.path / "recipe.yaml").read_text() == "name: a\n"
    create(tmp_path / "run", "name: b\n")
    assert (tmp_path / "run.1" / "recipe.yaml").read_text() == "name: a\n"


@pytest.mark.parametrize("fails", [True, False])
def test_a_report_that_cannot_be_made_hides_nothing(tmp_path, fails: bool) -> None:
    folder = create(tmp_path / "run", "name: a\n")
    with RunWriter(folder.path) as writer:
        records = Records(writer, Console("a", file=StringIO()))
        (folder.path / "metrics.jsonl").write_text("no JSON\n")
        if fails:
            with pytest.raises(KeyError) as caught, _ending(folder, records, lambda: None):
                raise KeyError("the cause")
            assert "recording the end failed too: " in caught.value.__notes__[0]
        else:
            with _ending(folder, records, lambda: None):
                pass
    kinds = [event["kind"] for event in read_events(folder.path)]
    assert kinds == (["error"] if fails else ["finish", "warning"])


@pytest.mark.parametrize("kept", [b"", b"- a", b"a: [", b"\xff", None])
def test_a_damaged_recipe_is_named(tmp_path, kept: bytes | None) -> None:
    folder = create(tmp_path / "run", "seed: 1\n")
    path = folder.path / "recipe.yaml"
    path.unlink() if kept is None else path.write_bytes(kept)
    with pytest.raises(ValueError, match="--resume: .*recipe.yaml is damaged: .*; put back the"):
        folder.check_same_recipe("seed: 1\n")


def test_a_state_of_no_stage_is_named(tmp_path) -> None:
    plan: Any = SimpleNamespace(stages=[SimpleNamespace(name="main", steps=9)])
    with pytest.raises(ValueError, match="step-000001 is damaged: it is of stage 1 and .* has 1"):
        _require_steps_left(
            plan, Checkpoint(tmp_path / "step-000001", replace(progress(1), stage_index=1))
        )


def test_resuming_with_another_recipe_names_what_differs(tmp_path) -> None:
    folder = create(tmp_path / "run", "seed: 1\nsteps: 3\nroles: {a: 1}\n")
    folder.check_same_recipe("seed: 1\nsteps: 9\nroles: {a: 1}\n")
    with pytest.raises(ValueError, match=r"differs from .*recipe.yaml in roles, seed; put these"):
        folder.check_same_recipe("seed: 2\nsteps: 3\nroles: {a: 2}\n")
