"""A parallel Megatron model computes what HuggingFace computes, and exports what it loaded."""

from pathlib import Path

import pytest
import torch

from megatron_bridge.layout import ParallelLayout
from megatron_bridge.runtime import parallel
from tests.bridge import parity, tiny
from tests.ranks import run_ranks

LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
    "dp2": ParallelLayout(dp=2),
    "uneven": ParallelLayout(pp=3, first_stage_layers=1, last_stage_layers=1),
    "vpp2": ParallelLayout(pp=2, vpp=2),
    "shared_heads": ParallelLayout(tp=4),
}


@pytest.fixture(scope="module", params=["untied", "tied"])
def tied(request) -> bool:
    return request.param == "tied"


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def made(request, tied, tmp_path_factory) -> tuple[Path, parity.Wanted]:
    model = tiny.model(request.param, tied=tied)
    folder = tiny.save(model, tmp_path_factory.mktemp("hf"))
    return folder, parity.wanted(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_gradients_and_export_equal_huggingface(made, layout):
    folder, want = made
    parity.check(run_ranks(parity.compare, LAYOUTS[layout].world, folder, LAYOUTS[layout], want))


@pytest.mark.parametrize("layout", ["tp1", "tp2pp2"])
def test_llama_3_rope_scaling_equals_huggingface(layout, tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    model = tiny.model("llama", rope_parameters=scaling, max_position_embeddings=131072)
    folder, want = tiny.save(model, tmp_path), parity.wanted(model)
    parity.check(run_ranks(parity.compare, LAYOUTS[layout].world, folder, LAYOUTS[layout], want))


def _bfloat16(folder: Path, layout: ParallelLayout, want: parity.Wanted) -> float:
    chunks = parity.build(folder, layout, torch.bfloat16)
    assert {p.dtype for chunk in chunks for p in chunk.parameters()} == {torch.bfloat16}
    worst = 0.0
    found = parity.logits_of(chunks, want.vocabulary)
    for logits, reference in zip(found, want.logits, strict=False):
        difference = (logits.float() - reference).norm() / reference.norm()
        worst = max(worst, difference.item())
    return worst


def test_bfloat16_stays_near_huggingfaces_float32(tmp_path):
    model = tiny.model("qwen3")
    folder, want = tiny.save(model, tmp_path), parity.wanted(model)
    with torch.no_grad():
        sequence = parity.packs(want.vocabulary)[0][3]
        theirs = model.bfloat16()(sequence[None, :-1]).logits[0].float()
    start = sum(parity.PACKS[0][:3])
    reference = want.logits[0][start : start + len(theirs)]
    rounding = ((theirs - reference).norm() / reference.norm()).item()
    results = run_ranks(_bfloat16, 4, folder, LAYOUTS["tp2pp2"], want)
    assert 0 < max(results) < 2 * rounding


def test_a_layout_must_be_the_processs_own(tmp_path):
    folder = tiny.save(tiny.model("llama"), tmp_path)

    with pytest.raises(AssertionError, match="is not the"):
        run_ranks(_other_layout, 1, folder)


def _other_layout(folder: Path) -> None:
    from megatron_bridge import live

    parallel.initialize(ParallelLayout())
    live.build_model(live.load_hf_config(folder), ParallelLayout(tp=2), dtype=torch.float32)
