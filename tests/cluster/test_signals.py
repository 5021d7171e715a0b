"""What is left when a driver is interrupted or killed: nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hybridflow.cluster import processes

ROOT = Path(__file__).parents[2]


def _start() -> tuple[subprocess.Popen[str], str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = {**kept, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.cluster.driver"]
    driver = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    return driver, driver.stdout.readline().strip()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_no_process_outlives_its_driver(number: signal.Signals) -> None:
    driver, mark = _start()
    family = psutil.Process(driver.pid).children(recursive=True)
    (head,) = [process.environ() for process in family if process.name() == "gcs_server"]
    assert head["RAY_AUTH_MODE"] == "token", "whoever reaches Ray's ports may run code"
    assert len(head["RAY_AUTH_TOKEN"]) == 64
    assert len(processes.marked(mark)) == 2, "the worker and its child"
    if number == signal.SIGKILL:
        # Ray ends what it started. A worker's own child must watch its parent, as servers do.
        family = [process for process in family if "time.sleep" not in " ".join(process.cmdline())]
    assert len(family) > 2
    driver.send_signal(number)
    driver.communicate(timeout=120)
    assert driver.returncode != 0
    _, left = psutil.wait_procs(family, timeout=200)  # Ray's agents take their time
    try:
        assert left == []
        assert number == signal.SIGKILL or processes.marked(mark) == []
    finally:
        processes.end_marked(mark, patience=0.0)


@pytest.mark.slow
def test_a_ray_that_does_not_start_is_one_line_with_advice() -> None:
    """Its object store is too small here; a machine with too much to do looks alike."""
    code = "from hybridflow.cluster import RaySession; RaySession(object_store_bytes=1000)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: Ray did not start on this machine: ") and "(load " in last
    assert "--address" in last and ended.returncode == 1
