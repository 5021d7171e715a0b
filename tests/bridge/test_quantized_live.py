"""Quantised checkpoints load onto live models as what they stand for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_bridge import live
from megatron_bridge.huggingface.folder import HuggingFaceFolder
from megatron_bridge.huggingface.quantized import dequantized
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.source import whole
from tests.bridge import families_dense, families_moe, parity, tiny
from tests.ranks import run_ranks

BLOCK = 16


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in FP8 with a scale per block; blocks at the edges are smaller."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales = torch.empty(rows, columns)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for r in range(rows):
        for c in range(columns):
            index = slice(r * BLOCK, (r + 1) * BLOCK), slice(c * BLOCK, (c + 1) * BLOCK)
            scales[r, c] = weight[index].abs().max() / 448
            codes[index] = (weight[index] / scales[r, c]).to(torch.float8_e4m3fn)
    return codes, scales


def _quantised(folder: Path, settings: dict, change) -> None:
    """Rewrite a folder's projections with ``change``."""
    tensors = parity.read_all(folder)
    for name in list(tensors):
        if name.endswith("_proj.weight") or ".experts." in name:
            change(tensors, name)
        elif not name.endswith("e_score_correction_bias"):
            tensors[name] = tensors[name].bfloat16()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": settings, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


def _to_fp8(tensors: dict, name: str) -> None:
    tensors[name], tensors[f"{name}_scale_inv"] = _fp8(tensors[name].float())


def _to_mxfp4(tensors: dict, name: str) -> None:
    if name.endswith("_bias") or "experts" not in name:
        tensors[name] = tensors[name].bfloat16()
        return
    experts, rows, columns = tensors.pop(name).shape  # [experts, in, out], groups of 32 inputs
    generator = torch.Generator().manual_seed(len(tensors))
    shape = (experts, columns, rows // 32)
    bits = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    tensors[f"{name}_blocks"] = bits
    tensors[f"{name}_scales"] = torch.randint(
        118, 124, shape, generator=generator, dtype=torch.uint8
    )


def _load(folder: Path, layout: ParallelLayout, saved: Path) -> dict[str, torch.Tensor]:
    chunks = parity.build(folder, layout, torch.bfloat16)
    exported = {n: t.clone() for n, t in live.export_weights(chunks, live.load_hf_config(folder))}
    live.save_pretrained(chunks[0], folder, saved)
    return exported


CASES = {
    "fp8": (
        lambda: families_moe.model("deepseek_v3"),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
        _to_fp8,
    ),
    "mxfp4": (
        lambda: families_dense.model("gpt_oss", hidden_size=64, intermediate_size=32),
        {"quant_method": "mxfp4"},
        _to_mxfp4,
    ),
}


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=2, dp=2, ep=2)], ids=str)
@pytest.mark.parametrize("kind", CASES)
def test_a_quantised_folder_loads_as_what_it_stands_for(kind, layout, tmp_path):
    make, settings, change = CASES[kind]
    folder = tiny.save(make(), tmp_path / "hf")
    _quantised(folder, settings, change)
    opened = HuggingFaceFolder(folder)
    plain = dequantized(opened, opened.config(), torch.bfloat16)
    assert plain is not opened
    exported = run_ranks(_load, layout.world, folder, layout, tmp_path / "saved")[0]
    assert exported.keys() == plain.tensors().keys()
    for name, info in plain.tensors().items():
        assert torch.equal(exported[name], plain.read(name, whole(info.shape))), name
    saved = HuggingFaceFolder(tmp_path / "saved")
    assert "quantization_config" not in saved.config()
    assert saved.tensors().keys() == exported.keys()
