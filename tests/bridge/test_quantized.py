"""Quantised checkpoints as plain tensors: the numbers of the makers' own code, in any rectangle."""

import json
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_bridge.huggingface import decode, quantized
from megatron_bridge.huggingface.folder import HuggingFaceFolder
from megatron_bridge.source import Source, TensorInfo, whole
from tests.ranks import run_ranks

_FP8 = torch.float8_e4m3fn
_BLOCK = (4, 6)
_GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def _config(method: str = "fp8", **fields: Any) -> dict[str, Any]:
    settings = {"quant_method": method, "fmt": "e4m3", "weight_block_size": list(_BLOCK)}
    if method == "mxfp4":
        settings = {"quant_method": method, "modules_to_not_convert": ["lm_head"]}
    return {"model_type": "x", "torch_dtype": "float32", "quantization_config": settings | fields}


class _Tensors:
    """Tensors in memory as a source."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in self._tensors.items()}

    def read(self, name: str, ranges: tuple[tuple[int, int], ...]) -> torch.Tensor:
        return self._tensors[name][tuple(slice(*interval) for interval in ranges)]


def _fp8(rows: int, columns: int, *lead: int) -> dict[str, torch.Tensor]:
    """A weight of any codes, NaN among them, and scales of any size."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (*lead, rows, columns), generator=generator).to(torch.uint8)
    grid = (*lead, -(-rows // _BLOCK[0]), -(-columns // _BLOCK[1]))
    scales = torch.randn(grid, generator=generator).exp() * 1e-3
    return {"x.weight": codes.view(_FP8), "x.weight_scale_inv": scales}


def _mxfp4(experts: int, rows: int, groups: int) -> dict[str, torch.Tensor]:
    """Any bytes and any scales, the largest and smallest among them."""
    generator = torch.Generator().manual_seed(rows)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=generator)
    scales = torch.randint(0, 256, (experts, rows, groups), generator=generator)
    scales.view(-1)[:3] = torch.tensor([0, 254, 255])
    blocks.view(-1)[:256] = torch.arange(256)
    return {
        f"{_GATE_UP}_blocks": blocks.to(torch.uint8),
        f"{_GATE_UP}_scales": scales.to(torch.uint8),
    }


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit, but for the bits of NaN."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    kind = {2: torch.int16, 4: torch.int32}[ours.dtype.itemsize]
    ours, theirs = (t.nan_to_num(nan=7e4).contiguous().view(kind) for t in (ours, theirs))
    return torch.equal(ours, theirs)


def _read(source: Source, name: str) -> torch.Tensor:
    return source.read(name, whole(source.tensors()[name].shape))


def _reference(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """DeepSeek's weight_dequant: in float32, edges of incomplete blocks included."""
    rows, columns = weight.shape[-2:]
    scale = scales.float().repeat_interleave(_BLOCK[0], -2).repeat_interleave(_BLOCK[1], -1)
    return weight.float() * scale[..., :rows, :columns]


def test_every_code_is_decoded():
    codes = torch.arange(256, dtype=torch.uint8).view(_FP8)
    assert _same(decode.decode_fp8(codes.view(1, 256)), codes.bfloat16().view(1, 256))
    assert _same(decode.decode_fp8(codes[None, 1:]), codes.bfloat16()[None, 1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_equals_transformers(dtype, scale_dtype):
    tensors = _fp8(12, 18)
    scales = tensors["x.weight_scale_inv"] = tensors["x.weight_scale_inv"].to(scale_dtype)
    source = quantized.dequantized(_Tensors(tensors), _config(), dtype)
    theirs = Fp8Dequantize(None)._dequantize_one(tensors["x.weight"], scales, dtype)
    assert source.tensors() == {"x.weight": TensorInfo(dtype, (12, 18))}
    assert _same(_read(source, "x.weight"), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mxfp4_equals_transformers(dtype):
    blocks, scales = (tensors := _mxfp4(3, 11, 5)).values()
    source = quantized.dequantized(_Tensors(tensors), _config("mxfp4"), dtype)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert source.tensors() == {_GATE_UP: TensorInfo(dtype, (3, 160, 11))}
    assert _same(_read(source, _GATE_UP), theirs)


@given(st.data(), st.sampled_from([(9, 13), (13, 17, 2, 3), (4, 6), (1, 1)]))
@settings(max_examples=150, deadline=None)
def test_any_rectangle_of_fp8(data, shape):
    tensors = _fp8(*shape)
    expected = _reference(*tensors.values()).bfloat16()
    _any_rectangle(data, _Tensors(tensors), _config(), "x.weight", expected)


@given(st.data(), st.sampled_from([(2, 7, 3), (1, 9, 2)]))
@settings(max_examples=150, deadline=None)
def test_any_rectangle_of_mxfp4(data, shape):
    tensors = _mxfp4(*shape)
    expected = convert_moe_packed_tensors(*tensors.values())
    _any_rectangle(data, _Tensors(tensors), _config("mxfp4"), _GATE_UP, expected)


def _any_rectangle(data, plain: Source, config: dict, name: str, expected: torch.Tensor) -> None:
    source = quantized.dequantized(plain, config)
    ranges = []
    for size in expected.shape:
        first = data.draw(st.integers(0, size))
        ranges.append((first, data.draw(st.integers(first, size))))
    part = expected[tuple(slice(*interval) for interval in ranges)]
    assert _same(source.read(name, tuple(ranges)), part)


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_rectangle_larger_than_the_working_memory(monkeypatch, method):
    monkeypatch.setattr(quantized, "WORKING_BYTES", 300)
    tensors = _fp8(30, 11) if method == "fp8" else _mxfp4(2, 30, 1)
    source = quantized.dequantized(_Tensors(tensors), _config(method))
    parts = tensors.values()
    if method == "fp8":
        expected = _reference(*parts).bfloat16()
    else:
        expected = convert_moe_packed_tensors(*parts)
    assert _same(_read(source, next(iter(source.tensors()))), expected)


def test_other_tensors_pass_as_they_are():
    tensors = {"a": torch.ones(3), **_fp8(4, 6), "b": torch.ones(2, dtype=torch.float16)}
    source = quantized.dequantized(_Tensors(tensors), _config())
    assert list(source.tensors()) == ["a", "x.weight", "b"]
    assert _read(source, "b").data_ptr() == tensors["b"].data_ptr()
    plain = _Tensors({"a": torch.ones(3)})
    assert quantized.dequantized(plain, {}) is plain


def _limited(folder: Path, budget: int) -> list[int]:
    """Reads all with at most ``budget`` bytes of writable memory more than now; the sizes."""
    whole_folder = HuggingFaceFolder(folder)
    source = quantized.dequantized(whole_folder, whole_folder.config())
    for name, info in source.tensors().items():  # tables are made, threads are there
        source.read(name, tuple((0, min(size, 2)) for size in info.shape))
    status = Path("/proc/self/status").read_text()
    now = int(status.split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (now + budget, resource.RLIM_INFINITY))
    return [_read(source, name).numel() for name in source.tensors()]


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_memory_is_the_result_and_a_bounded_rest(tmp_path, method):
    if method == "fp8":
        codes = torch.zeros(4096, 4096, dtype=torch.uint8)
        tensors = {"x": codes.view(_FP8), "x_scale_inv": torch.ones(32, 32)}
        config = _config(weight_block_size=[128, 128])
    else:
        tensors = {"x_blocks": torch.zeros(8, 1024, 64, 16, dtype=torch.uint8)}
        tensors["x_scales"] = torch.full((8, 1024, 64), 127, dtype=torch.uint8)
        config = _config("mxfp4")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = (1 << 24) * 2
    budget = result + quantized.WORKING_BYTES + (4 << 20)
    assert run_ranks(_limited, 1, tmp_path, budget) == [[1 << 24]]


def _error(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        quantized.dequantized(_Tensors(tensors), config)
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "gptq"}, "quantised with 'gptq' are not supported: the bridge reads fp8"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ({"quant_method": None}, "quantised with None"),
        ({"weight_block_size": None}, "weight_block_size None are not supported (a scale per"),
        ({"weight_block_size": [128]}, "weight_block_size [128]"),
        ({"weight_block_size": [0, 4]}, "weight_block_size [0, 4]"),
        ({"fmt": "e5m2"}, "other than e4m3"),
    ],
)
def test_another_method_is_refused_by_name(fields, message):
    assert message in _error(_fp8(4, 6), _config(**fields))


def test_a_config_that_contradicts_the_weights_is_refused():
    assert "says fp8, but no tensor is quantised" in _error({"a": torch.ones(2)}, _config())
    assert "says mxfp4, but no tensor" in _error({"a": torch.ones(2)}, _config("mxfp4"))
    assert "no quantization_config, but these are FP8: x.weight" in _error(_fp8(4, 6), {})
    assert "no JSON object" in _error({}, {"quantization_config": []})
    assert "compressed-tensors" in _error({}, {"compression_config": {"format": "int"}})


def test_all_fp8_faults_are_told_at_once():
    good = _fp8(9, 13)
    tensors = {
        "lone.weight": good["x.weight"],
        "gone.weight_scale_inv": good["x.weight_scale_inv"],
        "plain.weight": torch.ones(9, 13),
        "plain.weight_scale_inv": good["x.weight_scale_inv"],
        "wide.weight": good["x.weight"],
        "wide.weight_scale_inv": torch.ones(3, 2),
        "whole.weight": good["x.weight"],
        "whole.weight_scale_inv": torch.ones(3, 3, dtype=torch.int32),
    }
    text = _error(tensors, _config())
    assert "'lone.weight' is FP8, but 'lone.weight_scale_inv' is missing" in text
    assert "'gone.weight_scale_inv' scales a tensor that is missing" in text
    assert "'plain.weight' has a scale, but is float32 (9, 13)" in text
    assert "'wide.weight_scale_inv' is float32 (3, 2); 'wide.weight' of (9, 13)" in text
    assert "'whole.weight_scale_inv' is int32 (3, 3)" in text


def test_all_mxfp4_faults_are_told_at_once():
    blocks, scales = _mxfp4(2, 9, 3).values()
    tensors = {
        "a_blocks": blocks,
        "b_scales": scales,
        "c_blocks": blocks[..., :8],
        "c_scales": scales,
        "d_blocks": blocks,
        "d_scales": scales[:1],
        "e_blocks": blocks,
        "e_scales": scales,
        "e": torch.ones(1),
    }
    text = _error(tensors, _config("mxfp4"))
    assert "'a_blocks' is MXFP4, but 'a_scales' is missing" in text
    assert "'b_scales' scales a tensor that is missing" in text
    assert "'c_blocks' is uint8 (2, 9, 3, 8), not bytes [experts, rows, groups, 16]" in text
    assert "'d_scales' is uint8 (1, 9, 3), not bytes (2, 9, 3)" in text
    assert "'e' is there twice" in text


def test_the_plain_config_has_the_dtype_and_no_quantisation():
    config = quantized.plain_config(_config(), torch.float16)
    assert config == {"model_type": "x", "torch_dtype": "float16"}
    assert quantized.plain_config({}) == {"dtype": "bfloat16"}
