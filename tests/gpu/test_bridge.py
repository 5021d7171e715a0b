"""The bridge on one CUDA GPU: every family computes and exports what it does on CPUs."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_bridge.layout import ParallelLayout
from megatron_bridge.runtime import device
from tests.bridge import families_dense, families_moe, parity, tiny

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    """One rank over NCCL."""
    assert device.on_gpu(), "no CUDA device is usable"
    torch.cuda.set_device(0)
    rendezvous = tmp_path_factory.mktemp("group") / "file"
    dist.init_process_group(
        device.backend(), init_method=f"file://{rendezvous}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def groups():
    """Each test builds Megatron's groups anew."""
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def _models() -> dict[str, Any]:
    cases: dict[str, Any] = {kind: lambda k=kind: tiny.model(k) for kind in tiny.ARCHITECTURES}
    cases |= {kind: lambda k=kind: families_dense.model(k) for kind in families_dense.CONFIGS}
    return cases | {kind: lambda k=kind: families_moe.model(k) for kind in families_moe.CONFIGS}


@pytest.mark.parametrize("kind", _models())
def test_logits_gradients_and_export_equal_huggingface(kind, tmp_path):
    assert os.environ.get("NVIDIA_TF32_OVERRIDE") in (None, "0")
    model = _models()[kind]()
    folder = tiny.save(model, tmp_path / "hf")
    want = families_moe.wanted(model, tmp_path / "gradients")
    result = parity.compare(folder, ParallelLayout(), want)
    print(kind, result)
    parity.check([result])


def _bfloat16(folder: Path, want: parity.Wanted) -> float:
    chunks = parity.build(folder, ParallelLayout(), torch.bfloat16)
    worst = 0.0
    for logits, reference in zip(
        parity.logits_of(chunks, want.vocabulary), want.logits, strict=True
    ):
        difference = (logits.float().cpu() - reference).norm() / reference.norm()
        worst = max(worst, difference.item())
    return worst


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_bfloat16_stays_near_float32(kind, tmp_path):
    model = _models()[kind]()
    folder = tiny.save(model, tmp_path)
    want = parity.wanted(model)
    # Weights of eight bits of mantissa, four layers: a few times 2^-8 of the logits' norm.
    assert 0 < _bfloat16(folder, want) < 0.1
