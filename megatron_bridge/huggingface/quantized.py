"""Quantised checkpoints as plain tensors: only the asked-for rectangle is dequantised.

FP8 with block scales (DeepSeek-V3, Kimi-K2, Qwen3-FP8) and MXFP4 (GPT-OSS). A read takes the
rectangle in the result's dtype and about ``WORKING_BYTES`` besides (or one row).
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.huggingface.decode import FP4_GROUP, FP8, decode_fp4, decode_fp8, scale_fp4
from megatron_bridge.huggingface.safetensors_file import inside, listed
from megatron_bridge.source import Ranges, Source, TensorInfo

WORKING_BYTES = 4 << 20
QUANTIZATION = "quantization_config"

_SUPPORTED = (
    "the bridge reads fp8 (e4m3 with weight_block_size) and mxfp4; convert it to bfloat16 first"
)
_FP8_SCALE = "_scale_inv"
_FP8_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_FP8_DTYPES = (FP8, torch.float8_e5m2)
# Bytes that a value takes on its way: code, half an index, bfloat16, float32 and its scale.
_FP8_WORK = 16
_BLOCKS, _SCALES = "_blocks", "_scales"
_FP4_SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
_FP4_WORK = 8


def dequantized(
    source: Source, config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> Source:
    """``source`` with its quantised tensors in ``dtype`` and without their scales.

    A checkpoint that is not quantised is returned as it is. Numbers are those of the makers' own
    code: FP8 is multiplied by its scale in float32 and rounded once, MXFP4 is exact.

    Args:
        source: the checkpoint's tensors.
        config: its config.json.
        dtype: of the dequantised tensors; others keep theirs.

    Raises:
        ValueError: when the method is not supported, or tensors, scales and config disagree.
    """
    method = _method(config)
    if method is None:
        _check_plain(source.tensors())
        return source
    tensors = source.tensors()
    if method == "mxfp4":
        quantized, faults = _find_mxfp4(tensors, dtype)
    else:
        quantized, faults = _find_fp8(tensors, _block_size(config[QUANTIZATION]), dtype)
    if faults:
        raise ValueError(f"the {method} tensors do not fit together: {listed(faults)}")
    if not quantized:
        raise ValueError(
            f"config.json says {method}, but no tensor is quantised; take {QUANTIZATION} out of it "
            "or fetch the checkpoint again"
        )
    return _Dequantized(source, quantized)


def plain_config(config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """config.json of the dequantised checkpoint: no quantisation, and the weights' dtype."""
    plain = {key: value for key, value in config.items() if key != QUANTIZATION}
    keys = plain.keys() & {"dtype", "torch_dtype"} or {"dtype"}
    return {**plain, **dict.fromkeys(keys, str(dtype).removeprefix("torch."))}


def _method(config: Mapping[str, Any]) -> str | None:
    """The quantisation method, checked."""
    if config.get("compression_config"):
        raise ValueError(f"weights in compressed-tensors format are not supported: {_SUPPORTED}")
    settings = config.get(QUANTIZATION)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ValueError(f"{QUANTIZATION} in config.json is no JSON object")
    method = settings.get("quant_method")
    if method == "fp8":
        if settings.get("fmt", "e4m3") != "e4m3" or settings.get("expert_dtype", "fp8") != "fp8":
            raise ValueError(f"fp8 weights other than e4m3 are not supported: {_SUPPORTED}")
        _block_size(settings)
    elif method != "mxfp4":
        raise ValueError(f"weights quantised with {method!r} are not supported: {_SUPPORTED}")
    return method


def _block_size(settings: Mapping[str, Any]) -> tuple[int, int]:
    size = settings.get("weight_block_size")
    if not isinstance(size, list) or [type(n) for n in size] != [int, int] or min(size) < 1:
        raise ValueError(
            f"fp8 weights with weight_block_size {size!r} are not supported (a scale per tensor or "
            f"per channel): {_SUPPORTED}"
        )
    return size[0], size[1]


def _check_plain(tensors: Mapping[str, TensorInfo]) -> None:
    found = [name for name, info in tensors.items() if info.dtype in _FP8_DTYPES]
    if found:
        raise ValueError(
            f"config.json has no {QUANTIZATION}, but these are FP8: {listed(found, ', ')}; fetch "
            "config.json again"
        )


class _Dequantized:
    """A source whose quantised tensors are plain."""

    def __init__(self, source: Source, quantized: "_Found") -> None:
        self._source = source
        self._quantized = dict(quantized.values())
        scales = {tensor.scale for tensor in self._quantized.values()}
        self._infos: dict[str, TensorInfo] = {}
        for name, info in source.tensors().items():
            if name in quantized:
                plain, tensor = quantized[name]
                self._infos[plain] = tensor.info
            elif name not in scales:
                self._infos[name] = info

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, ranges: Ranges) -> Tensor:
        if name not in self._quantized:
            return self._source.read(name, ranges)
        assert inside(self._infos[name].shape, ranges), (name, self._infos[name].shape, ranges)
        return self._quantized[name].read(self._source, ranges)


@dataclass(frozen=True)
class _Fp8:
    """Weight [..., rows, columns] in FP8; a scale per block: [..., row blocks, column blocks]."""

    data: str
    scale: str
    info: TensorInfo
    block: tuple[int, int]

    def read(self, source: Source, ranges: Ranges) -> Tensor:
        *lead, (top, bottom), (left, right) = ranges
        grid = tuple(map(_blocks_of, ranges[-2:], self.block))
        scales = source.read(self.scale, (*lead, *grid)).float()
        data = source.read(self.data, ranges)
        result = torch.empty(data.shape, dtype=self.info.dtype)
        if not result.numel():
            return result
        block_of_column = torch.arange(left, right) // self.block[1] - grid[1][0]
        steps = _steps(top, bottom, self.block[0], WORKING_BYTES // _FP8_WORK // (right - left))
        for index in itertools.product(*map(range, data.shape[:-2])):
            for begin, end in steps:
                here = (*index, slice(begin - top, end - top))
                scale = scales[index][begin // self.block[0] - grid[0][0]][block_of_column]
                result[here] = decode_fp8(data[here]).float().mul_(scale)
        return result


@dataclass(frozen=True)
class _Mxfp4:
    """Blocks [experts, rows, groups, 16] of two values a byte, scales [experts, rows, groups].

    The result is transposed, as transformers has it: [experts, groups * 32, rows].
    """

    data: str
    scale: str
    info: TensorInfo

    def read(self, source: Source, ranges: Ranges) -> Tensor:
        experts, (left, right), rows = ranges
        groups = _blocks_of((left, right), FP4_GROUP)
        data = source.read(self.data, (experts, rows, groups, (0, FP4_GROUP // 2)))
        scales = source.read(self.scale, (experts, rows, groups))
        result = torch.empty(*data.shape[:3], FP4_GROUP, dtype=self.info.dtype)
        most = WORKING_BYTES // _FP4_WORK // max(1, data.shape[2] * FP4_GROUP)
        for expert in range(data.shape[0] if result.numel() else 0):
            for begin, end in _steps(0, data.shape[1], data.shape[1], most):
                here = (expert, slice(begin, end))
                scale_fp4(result[here], decode_fp4(data[here]), scales[here])
        first = groups[0] * FP4_GROUP
        return result.flatten(2)[:, :, left - first : right - first].transpose(1, 2)


# By the data's name in the source: the plain name and the tensor.
_Found = dict[str, tuple[str, _Fp8 | _Mxfp4]]


def _find_fp8(
    tensors: Mapping[str, TensorInfo], block: tuple[int, int], dtype: torch.dtype
) -> tuple[_Found, list[str]]:
    found: _Found = {}
    faults = []
    for name, info in tensors.items():
        if name.endswith(_FP8_SCALE) and name.removesuffix(_FP8_SCALE) not in tensors:
            faults.append(f"'{name}' scales a tensor that is missing")
        scale = tensors.get(name + _FP8_SCALE)
        if scale is None:
            if info.dtype in _FP8_DTYPES:
                faults.append(f"'{name}' is FP8, but '{name + _FP8_SCALE}' is missing")
            continue
        if info.dtype is not FP8 or len(info.shape) < 2:
            faults.append(f"'{name}' has a scale, but is {_told(info)}")
            continue
        rows, columns = (
            -(-size // edge) for size, edge in zip(info.shape[-2:], block, strict=True)
        )
        expected = (*info.shape[:-2], rows, columns)
        if scale.shape != expected or scale.dtype not in _FP8_SCALE_DTYPES:
            faults.append(
                f"'{name + _FP8_SCALE}' is {_told(scale)}; '{name}' of {info.shape} in blocks of "
                f"{block} needs a floating-point {expected}"
            )
        plain = TensorInfo(dtype, info.shape)
        found[name] = name, _Fp8(name, name + _FP8_SCALE, plain, block)
    return found, faults


def _find_mxfp4(tensors: Mapping[str, TensorInfo], dtype: torch.dtype) -> tuple[_Found, list[str]]:
    found: _Found = {}
    faults = []
    for name, info in tensors.items():
        plain = name.removesuffix(_BLOCKS)
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS not in tensors:
            faults.append(f"'{name}' scales a tensor that is missing")
        if plain == name:
            continue
        scale = tensors.get(plain + _SCALES)
        if scale is None:
            faults.append(f"'{name}' is MXFP4, but '{plain + _SCALES}' is missing")
        elif info.dtype is not torch.uint8 or info.shape[3:] != (FP4_GROUP // 2,):
            faults.append(f"'{name}' is {_told(info)}, not bytes [experts, rows, groups, 16]")
        elif scale.shape != info.shape[:3] or scale.dtype not in _FP4_SCALE_DTYPES:
            faults.append(f"'{plain + _SCALES}' is {_told(scale)}, not bytes {info.shape[:3]}")
        elif plain in tensors:
            faults.append(f"'{plain}' is there twice, quantised and plain")
        else:
            experts, rows, groups, _ = info.shape
            shape = (experts, groups * FP4_GROUP, rows)
            tensor = _Mxfp4(name, plain + _SCALES, TensorInfo(dtype, shape))
            found[name] = plain, tensor
    return found, faults


def _told(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {info.shape}"


def _blocks_of(interval: tuple[int, int], size: int) -> tuple[int, int]:
    """The blocks that an interval touches; none for an empty one."""
    first, last = interval
    return first // size, -(-last // size) if last > first else first // size


def _steps(begin: int, end: int, block: int, most: int) -> list[tuple[int, int]]:
    """Cut an interval at the multiples of ``block`` and into pieces of at most ``most``."""
    steps = []
    while begin < end:
        until = min(end, (begin // block + 1) * block, begin + max(most, 1))
        steps.append((begin, until))
        begin = until
    return steps
