"""What a server leaves in shared memory goes with it, and nothing else does."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hybridflow.rollout import ServerConfig, start_server, supervise
from tests.tiny_models import make_model

SHARED = Path("/dev/shm")
HOLDS = """
import mmap, os, sys, time
for name in sys.argv[1:]:
    descriptor = os.open("/dev/shm/" + name, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, 4096)
    globals()[name] = mmap.mmap(descriptor, 4096)
    os.close(descriptor)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def supervised(request: pytest.FixtureRequest) -> Callable[..., subprocess.Popen]:
    """Starts a supervised process that has mapped files of shared memory."""

    def start(*names: str) -> subprocess.Popen:
        held = [sys.executable, "-c", HOLDS, *names]
        process = subprocess.Popen(
            [sys.executable, "-S", supervise.__file__, str(os.getpid()), *held],
            stdout=subprocess.PIPE,
            text=True,
        )
        request.addfinalizer(process.kill)
        for name in names:
            request.addfinalizer(lambda name=name: (SHARED / name).unlink(missing_ok=True))
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    return start


def test_files_of_the_server_alone_are_removed(supervised) -> None:
    tag = secrets.token_hex(4)
    own = [f"sgl_shm_mq_1_{tag}", f"sglang_loads_{tag}.shm", f"sem.mp-{tag}"]
    ours, others = supervised(*own, f"kept-{tag}"), f"sgl_shm_mq_2_{tag}"
    other = supervised(others)
    ours.send_signal(signal.SIGTERM)
    assert ours.wait(60) == 128 + signal.SIGTERM
    assert not any((SHARED / name).exists() for name in own)
    assert (SHARED / f"kept-{tag}").exists() and (SHARED / others).exists()
    other.terminate()
    other.wait(60)
    assert not (SHARED / others).exists()


def test_files_of_a_server_that_was_killed_are_removed(supervised) -> None:
    name = f"sgl_shm_mq_3_{secrets.token_hex(4)}"
    process = supervised(name)
    time.sleep(2.5)  # it looks after a second
    (server,) = psutil.Process(process.pid).children()
    server.kill()
    assert process.wait(60) == 128 + signal.SIGKILL
    assert not (SHARED / name).exists()


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_sglang_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    for end in ("stop", "kill"):
        server = start_server(ServerConfig("sglang", model, tp=2, start_timeout=400))
        (child,) = psutil.Process(server.pid).children()
        files = supervise._SharedFiles(child.pid)
        files.look()
        used = set(files._found)
        assert any("sgl_shm_mq" in name for name in used)
        assert any("sglang_loads_" in name for name in used)
        if end == "kill":
            time.sleep(5.0)  # the supervisor looks at times
            child.kill()
            server._process.wait(60)
        server.stop()
        assert not [name for name in used if Path(name).exists()]
