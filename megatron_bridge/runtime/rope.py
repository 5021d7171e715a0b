"""Rotary embeddings of packed sequences, for the CPU.

Megatron's unfused form computes the pack's angles, cosines and sines again for queries and keys of
every layer, one slice per sequence. Here they are computed once per pack and stay with its offsets.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Rotate(torch.autograd.Function):
    """x cos + rotate_half(x) sin, whose gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = cos, sin
        return _rotated(x, cos, sin, sign=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _rotated(gradient, *ctx.angles, sign=-1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
    """x [T, H, D]; cos, sin [T, 1, D], each half of D the same."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out


def _angles(offsets: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D] of every token's position in its sequence, kept on ``offsets``."""
    kept = getattr(offsets, "_rotary", None)
    if kept is not None and kept[0] is frequencies and kept[1] == dtype:
        return kept[2]
    lengths = (offsets[1:] - offsets[:-1]).long()
    starts = torch.repeat_interleave(offsets[:-1].long(), lengths)
    positions = torch.arange(len(starts), device=offsets.device) - starts
    by_position = frequencies.squeeze(1)
    cos, sin = (by_position.cos()[positions].to(dtype), by_position.sin()[positions].to(dtype))
    offsets._rotary = (frequencies, dtype, (cos, sin))  # type: ignore[attr-defined]
    return cos, sin


def packed_rotary(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's ``apply_rotary_pos_emb`` with a quicker path for whole heads in packs."""

    def apply(
        t: Tensor,
        freqs: Tensor,
        config: Any,
        cu_seqlens: Tensor | None = None,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:
        plain = mscale == 1.0 and not config.rotary_interleaved
        whole = freqs.shape[-1] == t.shape[-1] and config.context_parallel_size == 1
        if cu_seqlens is None or not (plain and whole):
            return stock(t, freqs, config, cu_seqlens, mscale, cp_group)
        return _Rotate.apply(t, *_angles(cu_seqlens, freqs, t.dtype))  # type: ignore[return-value]

    return apply
