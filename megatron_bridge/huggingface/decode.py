"""FP8 and FP4 codes to floats on a CPU, by looking up two bytes at a time."""

import functools

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
# MXFP4: 32 values of E2M1 share a scale, a power of two; two values lie in a byte.
FP4_GROUP = 32
# Twice the values of the codes 0 to 7; 8 to 15 are their negatives. Half of each scale makes up
# for it: the largest, 2^128, is infinite as a float32.
_DOUBLED_FP4_VALUES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
_HALVED_E8M0_BIAS = 128


def decode_fp8(data: Tensor) -> Tensor:
    """FP8 [rows, columns] as bfloat16, which holds it exactly. Two values per look-up: torch's own
    conversion takes six times as long on a CPU."""
    size = data.numel()
    codes = torch.zeros(size + size % 2, dtype=torch.uint8)
    codes[:size].view(data.shape).copy_(data.view(torch.uint8))
    index = codes.view(torch.int16).int().add_(1 << 15)
    pairs = torch.index_select(_fp8_pairs(), 0, index)
    return pairs.view(torch.bfloat16)[:size].view(data.shape)


@functools.cache
def _fp8_pairs() -> Tensor:
    """For each two bytes, as int16 + 2^15: their two values as bfloat16, in one int32."""
    both = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(FP8)
    return both.bfloat16().view(torch.int32)


def decode_fp4(data: Tensor) -> Tensor:
    """Twice the values of bytes [rows, groups, 16], as bfloat16 [rows, groups, 32].

    A byte's low half comes first.
    """
    # Copied, for a mapped file may start at an odd byte.
    index = data.clone(memory_format=torch.contiguous_format).view(torch.int16).flatten().int()
    fours = torch.index_select(_fp4_fours(), 0, index.add_(1 << 15))
    return fours.view(torch.bfloat16).view(*data.shape[:-1], FP4_GROUP)


@functools.cache
def _fp4_fours() -> Tensor:
    """For each two bytes, as int16 + 2^15: their four values, doubled, as bfloat16 in one int64."""
    values = torch.tensor(_DOUBLED_FP4_VALUES, dtype=torch.bfloat16)
    values = torch.cat((values, -values))
    both = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.uint8)
    halves = torch.stack((both & 15, both >> 4), dim=-1)
    return values[halves.int()].view(-1).view(torch.int64)


def scale_fp4(result: Tensor, values: Tensor, scales: Tensor) -> None:
    """``result`` = ``values`` / 2 [rows, groups, 32] * 2^(``scales`` - 127) [rows, groups]."""
    exponents = scales.view(torch.uint8).int() - _HALVED_E8M0_BIAS
    factors = torch.pow(2.0, exponents)[..., None]
    if result.dtype is torch.bfloat16:  # powers of two: exact in it as well
        torch.mul(values, factors.bfloat16(), out=result)
    else:
        result.copy_(values.float().mul_(factors))
