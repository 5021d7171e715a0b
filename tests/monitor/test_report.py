"""The report: self-contained, safe against what a model writes, right for runs of any length."""

import argparse
import math
import re
from html.parser import HTMLParser

import pytest

from hybridflow.commands import report as command
from hybridflow.monitor import RunWriter
from hybridflow.monitor.curve import write_curve
from hybridflow.monitor.report import write_report
from hybridflow.monitor.series import Series, smooth
from hybridflow.monitor.svg import ticks
from hybridflow.monitor.transcripts import choose

VOID = {"meta", "br", "th", "rect", "path", "circle"}
ATTACK = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x00 &amp; '\""


def record(folder, steps, reward=lambda step: step / 10, stage="grpo", writer=None):
    with RunWriter(folder) as run:
        for step in steps:
            metrics = {"reward/mean": reward(step), "update/loss": -0.01 * step, "extra/<b>": 1.0}
            if step % 10 == 0:
                metrics["eval/reward"] = reward(step)
            run.step(step, stage, metrics, {"generate": 0.4, "update": 0.3, "<i>": 0.1}, seconds=1)
    return folder


class Tags(HTMLParser):
    """Collects the tags and checks that they nest."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.seen, self.text = [], set(), []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_report_holds_curves_nodes_recipe_and_rollouts(tmp_path):
    record(tmp_path, range(1, 41))
    (tmp_path / "recipe.yaml").write_text("name: my-run\nsteps: 40  # <script>\n")
    with RunWriter(tmp_path, resume_step=40) as run:
        run.event("finish", "40 steps")
        rows = [{"prompt": "1+1=", "response": f"r{i}", "reward": i / 8} for i in range(8)]
        run.rollouts(40, rows, stage="grpo")
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    tags = Tags(path.read_text())
    text = " ".join(tags.text)
    for expected in ("my-run", "finished", "Stage grpo", "Reward", "Loss", "update", "best", "r7"):
        assert expected in text
    assert "0.300" in text  # the mean of the first five rewards
    assert "steps: 40  # <script>" in text
    assert not tags.seen & {"script", "link", "img", "iframe", "object"}


def test_nothing_is_fetched_and_no_script_runs(tmp_path):
    text = write_report(record(tmp_path, range(1, 4))).read_text()
    assert not re.search(r"https?://|src=|href=|url\(|@import", text)
    assert "default-src 'none'" in text


def test_what_a_model_writes_is_text(tmp_path):
    record(tmp_path, [1])
    with RunWriter(tmp_path, resume_step=1, resume_stage=f"grpo{ATTACK}") as run:
        row = {"prompt": ATTACK, "response": ATTACK + "\udc80", "reward": 1.0, "answer": ATTACK}
        run.rollouts(1, [row | {"rewards": {ATTACK: 1}, "version": ATTACK}])
        run.step(1, f"grpo{ATTACK}", {f"m{ATTACK}": 1.0}, {f"n{ATTACK}": 1.0})
        run.event("error", ATTACK)
    tags = Tags(write_report(tmp_path).read_text())
    assert not tags.seen & {"script", "img"}
    assert "<script>alert(1)</script>" in "".join(tags.text)


@pytest.mark.parametrize("steps", [[], [1], [7], [1, 2]])
def test_short_runs(tmp_path, steps):
    text = write_report(record(tmp_path, steps)).read_text()
    assert ("No step has finished yet" in text) == (steps == [])
    Tags(text)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -3.0, 1e-9, 1e12])
def test_any_metric_value_can_be_drawn(tmp_path, value):
    text = write_report(record(tmp_path, range(1, 40), reward=lambda step: value)).read_text()
    drawn = re.findall(r' d="([^"]*)"', text)
    assert drawn
    assert not [data for data in drawn if "nan" in data or "inf" in data]


def test_a_long_run_stays_small(tmp_path):
    with (record(tmp_path, []) / "metrics.jsonl").open("w") as file:
        for step in range(1, 10_001):
            file.write(
                f'{{"stage": "grpo", "step": {step}, "seconds": 1, "metrics": '
                f'{{"reward/mean": {step % 7}}}, "node_seconds": {{"update": 0.3}}}}\n'
            )
    assert write_report(tmp_path).stat().st_size < 300_000


def test_downsampling_keeps_the_extremes_and_gaps():
    values = [float(index % 10) for index in range(10_000)]
    values[:20] = [math.nan] * 20
    points = Series("x", list(range(10_000)), values).points()
    assert len(points) == 500
    assert math.isnan(points[0].value)
    assert (points[5].low, points[5].high) == (0.0, 9.0)
    assert Series("x", [1, 2], [3.0, 4.0]).points()[1].value == 4.0


def test_smoothing_leaves_out_what_is_no_number():
    assert smooth([1.0, 2.0, 6.0], 3) == [1.0, 3.0, 6.0]
    assert smooth([1.0, math.nan, 3.0, 5.0, 9.0], 3)[2:] == [4.0, 17 / 3, 9.0]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.02, 0.04), (0, 8), (4300, 6100), (0, 3e-5)])
def test_ticks_are_round_and_inside(low, high):
    found = ticks(low, high)
    assert 3 <= len(found) <= 8
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)


def test_best_worst_and_random_rollouts_are_distinct():
    rows = [{"reward": reward, "n": n} for n, reward in enumerate([0.5, 2.0, None, -1.0, 0.5])]
    chosen = choose(rows)
    assert [(kind, row["n"]) for kind, row in chosen[:2]] == [("best", 1), ("worst", 3)]
    assert [kind for kind, _ in chosen[2:]] == ["random", "random"]
    assert len({row["n"] for _, row in chosen}) == 4
    assert chosen == choose(rows)
    assert choose([rows[0]]) == [("best", rows[0])]
    held_out = {"reward": 9.0, "evaluation": True}
    assert choose([held_out, rows[0]]) == [("best", rows[0]), ("evaluation", held_out)]


def run_command(*words):
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    args = parser.parse_args(["report", *map(str, words)])
    return args.func(args)


def test_the_command_rebuilds_the_report_and_the_curve(tmp_path, capsys):
    record(tmp_path, range(1, 21))
    (tmp_path / "report.html").write_text("old")
    assert run_command(tmp_path, "--curve", tmp_path / "curve.png") == 0
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {tmp_path / 'report.html'}",
        f"wrote {tmp_path / 'curve.png'}",
    ]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(("name", "reason"), [("gone", "no such folder"), (".", "metrics.jsonl")])
def test_a_folder_without_a_run_is_refused(tmp_path, capsys, name, reason):
    assert run_command(tmp_path / name) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "is not a run folder" in lines[0]
    assert reason in lines[0]


def test_a_curve_needs_a_reward(tmp_path):
    RunWriter(tmp_path).close()
    with pytest.raises(ValueError, match="reward/mean"):
        write_curve(tmp_path)
    with pytest.raises(ValueError, match="the curve is a PNG, and .*c.xyz is named otherwise"):
        write_curve(tmp_path, tmp_path / "c.xyz")


def test_a_missing_matplotlib_is_named_with_the_remedy(tmp_path, monkeypatch, capsys):
    record(tmp_path, [1, 2])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert run_command(tmp_path, "--curve", tmp_path / "curve.png") == 2
    assert "pip install 'hybridflow[docs]'" in capsys.readouterr().err
