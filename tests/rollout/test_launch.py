"""Servers end when they should, and say why when they should not have."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from hybridflow.recipe.served import GPU_ONLY, NEVER_TIED
from hybridflow.rollout import ServerConfig, ServerDied, start_server

_STARTER = """
import sys, time
from hybridflow.rollout import ServerConfig, start_server
server = start_server(ServerConfig("local", sys.argv[1]))
print(server.pid, server.url, flush=True)
time.sleep(600)
"""


def _wait(condition, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)


def _gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_a_server_dies_with_its_parent(tiny_model: Path):
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(tiny_model)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert starter.stdout is not None
        supervisor = int(starter.stdout.readline().split()[0])
        [server] = _children(supervisor)
        starter.kill()
        starter.wait(60)
        _wait(lambda: _gone(supervisor) and _gone(server), "the server's end")
    finally:
        starter.kill()
        starter.wait()


def test_a_server_dies_with_its_supervisor(tiny_model: Path):
    server = start_server(ServerConfig("local", tiny_model))
    [child] = _children(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    _wait(lambda: _gone(child), "the server's end")
    server.stop()


def test_a_dead_server_shows_its_log(tiny_model: Path, tmp_path: Path):
    server = start_server(ServerConfig("local", tiny_model, log_path=tmp_path / "log"))
    try:
        server.check()
        requests.post(server.url + "/nowhere", json={}, timeout=60)
        [child] = _children(server.pid)
        os.kill(child, signal.SIGKILL)
        _wait(lambda: not server.alive(), "the supervisor's end")
        with pytest.raises(ServerDied, match=r"(?s)ended with status 137.*no endpoint /nowhere"):
            server.check()
    finally:
        server.stop()


def test_a_server_that_cannot_start_says_why(tiny_model: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((tiny_model / "config.json").read_text())
    with pytest.raises(ServerDied, match="holds no safetensors"):
        start_server(ServerConfig("local", broken))


def test_a_token_is_asked_for_and_stop_ends_everything(tiny_model: Path):
    server = start_server(ServerConfig("local", tiny_model, token="s3cret", host="0.0.0.0"))
    try:
        assert requests.get(server.url + "/model_info", timeout=60).status_code == 401
        wrong = {"Authorization": "Bearer wrong"}
        assert (
            requests.get(server.url + "/model_info", headers=wrong, timeout=60).status_code == 401
        )
        assert server.client().model_info()["weight_version"] == "0"
        [child] = _children(server.pid)
        assert b"s3cret" not in Path(f"/proc/{child}/cmdline").read_bytes()
    finally:
        server.stop()
    server.stop()
    assert _gone(server.pid) and _gone(child) and not server.folder.exists()


@pytest.mark.parametrize("name", GPU_ONLY)
def test_what_sglang_cannot_run_on_a_cpu_is_refused_before_a_server_starts(tmp_path: Path, name):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(ValueError, match=f"on a CPU cannot run {name} .*on a GPU; nor experts"):
        start_server(ServerConfig("sglang", tmp_path, tp=2, ep=2))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"]}))
    with pytest.raises(ValueError, match=r"spread over ranks \(ep 2\); set .* to 1"):
        start_server(ServerConfig("sglang", tmp_path, tp=2, ep=2))


@pytest.mark.parametrize("name", NEVER_TIED)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tied_output_layer_that_sglang_would_not_fill_is_refused(tmp_path: Path, name, device):
    config = {"architectures": [name], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"SGLang never ties {name}'s output layer.*local engine"):
        start_server(ServerConfig("sglang", tmp_path, device=device))


def test_bad_configs_are_refused_at_once(tiny_model: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="did you mean 'sglang'.*needs a token.*no config.json"):
        ServerConfig("sglan", tmp_path, host="0.0.0.0")
    with pytest.raises(ValueError, match="one rank, not tp 2"):
        ServerConfig("local", tiny_model, tp=2)
    with pytest.raises(ValueError, match="make sglang"):
        start_server(ServerConfig("sglang", tiny_model, python=str(tmp_path / "python")))
