"""The console: plain lines without control codes, and a terminal left as it was found."""

import io
import os
import pty
import subprocess
import sys

import pytest

from hybridflow.monitor import Console
from hybridflow.monitor.text import duration, number, tick

NODES = {"generate": 0.4, "score": 0.01, "update": 0.3, "publish": 0.05}


def metrics(step):
    return {"reward/mean": 0.1 * step, "update/kl": 2e-5, "length/mean": 12.34}


def test_plain_lines_have_no_control_codes_and_say_everything(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    with Console("quickstart", {"grpo": 5}, every=2, file=out) as console:
        for step in range(1, 6):
            evaluated = {"eval/reward": 0.75} if step == 3 else {}
            console.step(step, "grpo", metrics(step) | evaluated, NODES)
        console.event("checkpoint", "runs/q/checkpoints/5 [whole]")
    text = out.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [f"grpo {n}/5" for n in range(1, 6)]
    assert "reward 0.3  eval 0.75  kl 2e-5  length 12.34  generate 0.40 s" in lines[2]
    assert "eval" not in lines[3]
    assert "eta" in lines[0]
    assert lines[-1] == "checkpoint: runs/q/checkpoints/5 [whole]"


def test_plain_lines_show_every_kth_step_and_both_ends_of_a_stage():
    out = io.StringIO()
    with Console("quickstart", {"sft": 2, "grpo": 10}, every=4, file=out) as console:
        for stage, steps in (("sft", 2), ("grpo", 10)):
            for step in range(1, steps + 1):
                console.step(step, stage, {"update/loss": 1.0}, {})
    heads = [line.split("  ")[0] for line in out.getvalue().splitlines()]
    assert heads == ["sft 1/2", "sft 2/2", "grpo 1/10", "grpo 4/10", "grpo 8/10", "grpo 10/10"]


def test_an_unknown_length_has_no_eta():
    out = io.StringIO()
    with Console("quickstart", file=out) as console:
        console.step(1, "grpo", {"update/loss": float("nan")}, {})
    assert out.getvalue().startswith("grpo 1  loss NaN")
    assert "eta" not in out.getvalue()


def test_every_must_be_positive():
    with pytest.raises(ValueError, match="every=0"):
        Console("quickstart", every=0)


SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from hybridflow.monitor import Console
with Console("quickstart", {"grpo": 3}) as console:
    console.step(1, "grpo", {"reward/mean": float("nan"), "update/loss": 1.0}, {"generate": 0.4})
    console.step(2, "grpo", {"reward/mean": float("inf")}, {})
    console.step(2, "grpo", {"reward/mean": 0.5}, {f"node{i}": 0.1 * i for i in range(12)})
    print("A PRINT")
    print("AN ERROR LINE", file=sys.stderr)
    logging.info("A LOG RECORD")
    console.message("A [bold]MESSAGE")
    raise RuntimeError("the worker died")
"""


def run_on_a_terminal(script):
    """What the script writes to a pseudo-terminal, and its exit code."""
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=slave, stderr=slave, stdin=slave, env=environment
    ) as process:
        os.close(slave)
        output = b""
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not chunk:
                break
            output += chunk
        process.wait(60)
    os.close(master)
    return output.decode(), process.returncode


def test_a_live_panel_hides_nothing_and_restores_the_terminal_on_an_exception():
    text, code = run_on_a_terminal(SCRIPT)
    assert code == 1
    for line in ("A PRINT", "AN ERROR LINE", "A LOG RECORD", "A [bold]MESSAGE"):
        assert line in text
    assert "step 2/3" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
    assert text.rstrip().endswith("RuntimeError: the worker died")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.51234, "0.5123"), (12.3, "12.3"), (1234.5, "1,234"), (3.2e-6, "3.2e-6")],
)
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.25, "0.25"), (1500, "1,500"), (40_000, "40k"), (4.2e6, "4.2M"), (5e-4, "5e-4")],
)
def test_axis_labels_are_short(value, text):
    assert tick(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0042, "4.2 ms"), (0.42, "0.42 s"), (12.34, "12.3 s"), (125, "2:05"), (11229, "3:07:09")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
