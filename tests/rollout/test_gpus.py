"""Which GPUs a server's process sees; no server starts."""

import sys

import pytest

from hybridflow.rollout import commands
from hybridflow.rollout.launch import ServerConfig
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("gpus") / "model")


def _build(model, tmp_path, **named):
    config = ServerConfig("sglang", model, python=sys.executable, **named)
    return commands.build(config, 1234, tmp_path)


def test_a_servers_ranks_get_their_gpus_in_order(model, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")  # Ray's, for the worker
    command, environment = _build(model, tmp_path, device="cuda", tp=2, gpus=(6, 2))
    assert environment["CUDA_VISIBLE_DEVICES"] == "6,2"
    assert command[command.index("--tp") + 1] == "2"
    assert command[command.index("--device") + 1] == "cuda"


def test_without_gpus_of_its_own_it_sees_those_of_its_worker(model, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    assert _build(model, tmp_path, device="cuda")[1]["CUDA_VISIBLE_DEVICES"] == "6"
    assert _build(model, tmp_path)[1]["CUDA_VISIBLE_DEVICES"] == ""


def test_each_rank_has_one_gpu(model):
    with pytest.raises(ValueError, match=r"gpus \(1, 1\) are not one for each of tp 2"):
        ServerConfig("sglang", model, device="cuda", tp=2, gpus=(1, 1))
    with pytest.raises(ValueError, match="of a server on the CPU"):
        ServerConfig("sglang", model, gpus=(0,))
