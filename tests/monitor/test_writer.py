"""The run folder: what is written is read back, through crashes and resumes."""

import json
import math

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridflow.monitor import RunWriter, read_events, read_metrics, read_rollouts
from hybridflow.monitor.folder import first_rollouts, last_rollouts
from hybridflow.monitor.tensorboard import stage_folder

NODES = {"generate": 0.4, "update": 0.3}


def rollout(reward, response="4 2"):
    return {"prompt": "40+02=", "response": response, "reward": reward, "length": 3}


def write_steps(folder, stage, steps, **options):
    with RunWriter(folder, **options) as writer:
        for step in steps:
            writer.rollouts(step, [rollout(0.0), rollout(1.0)], stage=stage)
            writer.step(step, stage, {"reward/mean": step / 10}, NODES)


def places(rows):
    return [(row["stage"], row["step"]) for row in rows]


def test_a_step_is_read_back_with_every_number(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.step(
            1, "grpo", {"a": np.float32(0.5), "n": np.int64(7), "bad": math.nan, "inf": -math.inf},
            NODES, seconds=2.5,
        )  # fmt: skip
    text = (tmp_path / "metrics.jsonl").read_text()
    assert '"bad": "NaN"' in text
    assert json.loads(text, parse_constant=pytest.fail)["step"] == 1
    (row,) = read_metrics(tmp_path)
    assert (row["stage"], row["step"], row["seconds"]) == ("grpo", 1, 2.5)
    assert row["metrics"]["a"] == 0.5
    assert row["metrics"]["n"] == 7
    assert math.isnan(row["metrics"]["bad"])
    assert row["metrics"]["inf"] == -math.inf
    assert row["node_seconds"] == NODES


def test_lines_are_on_disk_before_the_writer_closes(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.event("start", "begin")
        writer.rollouts(1, [rollout(1.0)])
        writer.step(1, "grpo", {"reward/mean": 1.0}, {})
        assert len(read_metrics(tmp_path)) == len(read_events(tmp_path)) == 1
        assert len(list(read_rollouts(tmp_path))) == 1


def test_a_metric_that_is_no_number_is_named(tmp_path):
    with RunWriter(tmp_path) as writer, pytest.raises(TypeError, match="update/loss"):
        writer.step(1, "grpo", {"update/loss": [1.0, 2.0]}, {})  # type: ignore[dict-item]
    assert read_metrics(tmp_path) == []


def test_a_torn_last_line_is_left_out_and_a_broken_one_inside_is_an_error(tmp_path):
    write_steps(tmp_path, "grpo", [1, 2])
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"stage": "grpo", "st')
    assert places(read_metrics(tmp_path)) == [("grpo", 1), ("grpo", 2)]
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:3: not a JSON line"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("tail", ['{"torn": ', '{"stage": "grpo", "step": 9, "metrics": {}}'])
def test_resume_cuts_back_and_goes_on(tmp_path, tail):
    write_steps(tmp_path, "grpo", [1, 2, 3, 4])
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write(tail)
    write_steps(tmp_path, "grpo", [3], resume_step=2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert [row["step"] for row in read_rollouts(tmp_path)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("block", [1, 97, 1 << 20])
def test_resume_reads_only_what_it_drops(tmp_path, monkeypatch, block):
    """The rollouts of a long run are hundreds of gigabytes."""
    monkeypatch.setattr("hybridflow.monitor.jsonl.TAIL_BLOCK", block)
    write_steps(tmp_path, "grpo", [1, 2, 3])
    path = tmp_path / "rollouts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("never read\n" + "".join(lines[1:]))
    RunWriter(tmp_path, resume_step=2).close()
    assert path.read_text() == "never read\n" + "".join(lines[1:4])
    path.write_text("never read\n" + "".join(lines[1:4])[:-1])  # torn before its line feed
    write_steps(tmp_path, "grpo", [3], resume_step=2)
    assert path.read_text() == "never read\n" + "".join(lines[1:])


def test_resume_in_a_stage_keeps_earlier_stages_whole_and_drops_later_ones(tmp_path):
    with RunWriter(tmp_path) as writer:
        for stage, count in (("sft", 4), ("grpo", 3), ("polish", 2)):
            for step in range(1, count + 1):
                writer.step(step, stage, {"x": 1.0}, {})
    RunWriter(tmp_path, resume_step=2, resume_stage="grpo").close()
    expected = [("sft", step) for step in range(1, 5)] + [("grpo", 1), ("grpo", 2)]
    assert places(read_metrics(tmp_path)) == expected


def test_events_survive_a_resume(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.event("error", "rank 1 died", role="actor")
    RunWriter(tmp_path, resume_step=0).close()
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["text"], event["role"]) == ("error", "rank 1 died", "actor")


def test_a_fresh_run_moves_the_earlier_one_aside(tmp_path):
    write_steps(tmp_path, "grpo", [1, 2])
    write_steps(tmp_path, "grpo", [1])
    assert places(read_metrics(tmp_path)) == [("grpo", 1)]
    assert places(read_metrics(tmp_path / "previous-1")) == [("grpo", 1), ("grpo", 2)]
    write_steps(tmp_path, "grpo", [1])
    assert (tmp_path / "previous-2" / "tensorboard" / "grpo").is_dir()


def test_any_text_survives(tmp_path):
    texts = ["NaN", "-Infinity", "数学 \u2028 line", "lone \udc80 surrogate", 'quote " \\ \r\n\x00']
    with RunWriter(tmp_path) as writer:
        rewards = {"rewards": {"a": math.inf}}
        writer.rollouts(1, [rollout(math.inf, text) | rewards for text in texts])
    for rows in (list(read_rollouts(tmp_path)), last_rollouts(tmp_path)):
        assert [row["response"] for row in rows] == texts
        assert all(row["reward"] == row["rewards"]["a"] == math.inf for row in rows)


def test_first_and_last_rollouts_are_found_without_reading_all(tmp_path, monkeypatch):
    monkeypatch.setattr("hybridflow.monitor.jsonl.TAIL_BLOCK", 97)
    write_steps(tmp_path, "grpo", [1, 2, 3])
    with RunWriter(tmp_path, resume_step=3) as writer:
        writer.rollouts(4, [rollout(float(index), "é" * index) for index in range(50)])
    assert [row["reward"] for row in last_rollouts(tmp_path)] == list(map(float, range(50)))
    assert [row["reward"] for row in first_rollouts(tmp_path)] == [0.0, 1.0]


def scalars(folder, tag):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, round(event.value, 6)) for event in accumulator.Scalars(tag)]


def test_tensorboard_reads_the_scalars_of_each_stage(tmp_path):
    write_steps(tmp_path, "sft", [1, 2])
    write_steps(tmp_path, "grpo", [1], resume_step=2)
    folder = tmp_path / "tensorboard"
    assert scalars(folder / "sft", "reward/mean") == [(1, 0.1), (2, 0.2)]
    assert scalars(folder / "grpo", "seconds/generate") == [(1, 0.4)]


def test_tensorboard_drops_the_steps_that_a_resume_repeats(tmp_path):
    write_steps(tmp_path, "grpo", [1, 2, 3, 4])
    write_steps(tmp_path, "grpo", [3], resume_step=2)
    steps = [step for step, _ in scalars(tmp_path / "tensorboard" / "grpo", "reward/mean")]
    assert steps == [1, 2, 3]


@pytest.mark.parametrize("name", ["../up", "/etc", "..", "a/b"])
def test_a_stage_name_cannot_leave_the_folder(tmp_path, name):
    assert (tmp_path / stage_folder(name)).resolve().parent == tmp_path.resolve()
