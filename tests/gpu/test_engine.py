"""The training engine on one CUDA GPU: the same step as on the CPU."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge.runtime import device
from tests.bridge import families_moe, tiny

pytestmark = pytest.mark.gpu

_ROOT = Path(__file__).parents[2]
# Runs one update in a process of its own, with or without a GPU in sight, and saves what it gave.
_STEP = """
import pickle, sys
import torch
import torch.distributed as dist
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.runtime import device
from tests.megatron.cases import GRPO, make_batch, make_engine

folder, out, gpu = sys.argv[1], sys.argv[2], sys.argv[3] == "gpu"
assert device.on_gpu() == gpu
rendezvous = f"file://{out}.rendezvous"
dist.init_process_group(device.backend(), init_method=rendezvous, rank=0, world_size=1)
engine = make_engine(folder, ParallelLayout())
before = engine.logprobs(make_batch()).values
metrics = [engine.update(make_batch(), GRPO) for _ in range(3)]
weights = {name: tensor.cpu().clone() for name, tensor in engine.export_weights()}
with open(out, "wb") as file:
    pickle.dump((before, metrics, weights), file)
"""


def _step(folder: Path, out: Path, *, gpu: bool) -> tuple[Any, Any, Any]:
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    subprocess.run(
        [sys.executable, "-c", _STEP, str(folder), str(out), "gpu" if gpu else "cpu"],
        check=True,
        timeout=240,
        env=environment,
    )
    return pickle.loads(out.read_bytes())  # noqa: S301 (our own)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_three_updates_equal_those_of_the_cpu(kind, tmp_path):
    assert device.on_gpu(), "no CUDA device is usable"
    model = tiny.model(kind) if kind in tiny.ARCHITECTURES else families_moe.model(kind)
    folder = tiny.save(model, tmp_path / "hf")
    logprobs, metrics, weights = _step(folder, tmp_path / "gpu", gpu=True)
    wanted_logprobs, wanted_metrics, wanted = _step(folder, tmp_path / "cpu", gpu=False)
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=0, atol=1e-4)
    for found, reference in zip(metrics, wanted_metrics, strict=True):
        assert found == pytest.approx(reference, rel=1e-3, abs=1e-4)
    # The optimizer of these cases has a large eps, so that rounding stays rounding.
    for name, tensor in wanted.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4)
