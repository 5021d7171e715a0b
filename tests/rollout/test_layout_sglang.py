"""What the real SGLang holds after it loaded a checkpoint is what the declared layout makes of it.

A server's digest is over every parameter's name and bytes on every rank; a shape that is not the
declared one gives other bytes.
"""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file

from hybridflow.recipe.served import SERVED
from hybridflow.rollout import Sampling, ServerConfig, commands, start_server
from hybridflow.rollout.client import RolloutClient
from hybridflow.weight_sync import server_checksum
from hybridflow.weight_sync.layout import server_parameters
from hybridflow.weight_sync.layout.build import build
from hybridflow.weight_sync.slots import SlotLayout, create_slot
from tests.tiny_models import families, greedy, logprobs, make_model, reference

PROMPTS = [[5, 17, 33], [40, 8, 9, 10, 11, 12, 13]]
EXPERTS = ("deepseek_v2", "deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe")
LAYOUTS = [
    *((family, tp, 1) for family in families() for tp in (1, 2)),
    *((family, 2, 2) for family in EXPERTS),
]

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


def read(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_experts_in_sglang_and_in_the_local_engine(tmp_path: Path):
    folder = make_model(tmp_path / "model", "qwen3_moe")
    config, weights = read(folder)
    model = reference(folder)
    for engine in ("sglang", "local"):
        server = start_server(ServerConfig(engine, folder, start_timeout=400))
        try:
            client = server.client(timeout=120)
            assert client.checksum() == server_checksum(weights, config)
            groups = client.generate(PROMPTS, 2, Sampling(12, temperature=0.0))
        finally:
            server.stop()
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for sample in group:
                assert sample.tokens == greedy(model, prompt, 12)
                expected = logprobs(model, prompt, sample.tokens)
                assert sample.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp", "ep"), LAYOUTS)
def test_a_loaded_checkpoint_has_the_declared_layout(tmp_path: Path, family, tp, ep):
    folder = make_model(tmp_path / "model", family)
    config, weights = read(folder)
    with loaded_server(folder, tmp_path, tp, ep) as url:
        answer = requests.post(f"{url}/weights_checker", json={"action": "checksum"}, timeout=120)
    found = answer.json()["per_engine_checksum"]
    assert found == server_checksum(weights, config, tp, ep)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "qwen3"])
def test_what_follows_from_parameters_is_made_anew(tmp_path: Path, family: str):
    """Latent attention runs on tensors that SGLang derives from `kv_b_proj`."""
    folder = make_model(tmp_path / "model", family)
    config, weights = read(make_model(tmp_path / "other", family, seed=5))
    sync = tmp_path / "sync"
    sync.mkdir()
    parameters = server_parameters(config)
    slot = create_slot(sync / "slot", SlotLayout(parameters, torch.float32))
    for index, parameter in enumerate(parameters):
        slot.tensor(index).copy_(build(parameter, weights, torch.float32))
    control = {
        "operation": "standby",
        "slot": slot.path.name,
        "bytes": slot.layout.bytes,
        "parameters": slot.layout.entries(),
    }
    with loaded_server(folder, tmp_path, 1, 1, sync) as url:
        client = RolloutClient(url)
        (status,) = client.load_through(sync, [control])
        assert status.ok and ("derive" in status.seconds) == family.startswith("deepseek")
        assert client.checksum() == server_checksum(weights, config)
        (status,) = client.load_through(sync, [{"operation": "digest"}])
        assert "derive" not in status.seconds


def test_every_served_family_is_tried(tmp_path: Path):
    tried = {read(make_model(tmp_path / name, name))[0]["architectures"][0] for name in families()}
    assert set(SERVED) <= tried


@contextmanager
def loaded_server(
    folder: Path, work: Path, tp: int, ep: int, sync: Path | None = None
) -> Iterator[str]:
    """A server that has loaded the model; it need not be able to generate.

    SGLang's own operators on the CPU cannot run experts that are spread over ranks, so its first
    request at start is left out.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = ServerConfig("sglang", folder, tp=tp, sync_folder=sync)
    command, environment = commands.build(config, port, work)
    command += ["--ep-size", str(ep), "--skip-server-warmup", "--mem-fraction-static", "0.5"]
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_loaded(url, process, work / "log")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_loaded(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if requests.get(f"{url}/model_info", timeout=10).status_code == 200:
                return
        except requests.RequestException:
            pass  # it does not listen yet
        time.sleep(0.5)
    raise TimeoutError(f"{url} did not load its model within 400 s:\n{log.read_text()[-3000:]}")
