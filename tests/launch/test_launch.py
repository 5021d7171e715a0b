"""The launch scripts: short, well-formed, and run as two Ray nodes on this machine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hybridflow.cluster.host import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "launch").iterdir())


def test_the_four_scripts_are_there() -> None:
    names = [script.name for script in SCRIPTS]
    assert names == ["ray_head.sh", "ray_worker.sh", "slurm.sbatch", "torchrun.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_is_short_and_well_formed(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= 30
    assert "set -euo pipefail" in text
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, str(script)], check=True)


def test_a_worker_says_what_it_needs(tmp_path: Path) -> None:
    script = str(ROOT / "launch" / "ray_worker.sh")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    bare = subprocess.run([script], env=env, capture_output=True, text=True)
    assert bare.returncode != 0 and "usage: launch/ray_worker.sh HOST:PORT" in bare.stderr
    alone = subprocess.run([script, "localhost:1"], env=env, capture_output=True, text=True)
    assert alone.returncode == 2 and "copy ~/.ray/auth_token" in alone.stderr


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a short path, as Unix sockets need."""
    folder = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def _environment(home: Path) -> dict[str, str]:
    """This process's, without what a Ray of its own has put there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "HOME": str(home)}


def _node(script: str, scratch: Path, at: str, *options: str) -> subprocess.Popen[bytes]:
    command = [str(ROOT / "launch" / script), at, "--block", "--num-cpus=1", *options]
    with (scratch / f"{script}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--object-store-memory=100000000"],
            env=_environment(scratch),
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.slow
def test_head_and_worker_are_two_nodes_of_one_cluster(scratch: Path) -> None:
    port = free_port()
    address = f"{socket.gethostbyname(socket.gethostname())}:{port}"
    head = _node("ray_head.sh", scratch, str(port), f"--temp-dir={scratch}/ray")
    nodes = [head]
    try:
        _wait_for(scratch / "ray_head.sh.log", "Ray runtime started", head)
        nodes.append(_node("ray_worker.sh", scratch, address))
        env = {**_environment(scratch), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.launch.two_nodes", address]
        driver = subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240
        )
        logs = "".join(log.read_text()[-3000:] for log in scratch.glob("*.log"))
        assert driver.returncode == 0, driver.stderr + logs
        said = {name: values for name, *values in map(str.split, driver.stdout.splitlines())}
        assert said["totals"] == ["11", "11"]
        for pid in map(int, [*said["children"], *said["workers"]]):
            assert not psutil.pid_exists(pid), "the session ended its processes on either node"
    finally:
        left = _end(nodes)
    assert left == []


@pytest.mark.slow
def test_a_slot_is_one_gpu_for_all_that_work_in_it(scratch: Path) -> None:
    """Ray counts GPUs and tells its workers which they have; that it does without any GPU."""
    port = free_port()
    sizes = ("--num-cpus=4", "--num-gpus=4", f"--temp-dir={scratch}/ray")
    head = _node("ray_head.sh", scratch, str(port), *sizes)
    try:
        _wait_for(scratch / "ray_head.sh.log", "Ray runtime started", head)
        env = {**_environment(scratch), "PYTHONPATH": str(ROOT)}
        address = f"{socket.gethostbyname(socket.gethostname())}:{port}"
        command = [sys.executable, "-m", "tests.launch.gpu_slots", address]
        driver = subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240
        )
        assert driver.returncode == 0, driver.stderr
        assert driver.stdout.split() == ["gpus", "0", "1", "2", "3"]
    finally:
        left = _end([head])
    assert left == []


def _end(nodes: list[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    """End the nodes, the last one first; processes of theirs that are left."""
    family = [child for node in nodes for child in _tree(node.pid)]
    for node in nodes[::-1]:
        node.send_signal(signal.SIGTERM)
    return psutil.wait_procs(family, timeout=60)[1]


def _tree(pid: int) -> list[psutil.Process]:
    if not psutil.pid_exists(pid):
        return []
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def _wait_for(log: Path, text: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"waited 120 s for '{text}' in {log.read_text()}"
        time.sleep(0.2)
