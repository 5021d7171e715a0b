"""Rotary embeddings of packed sequences, for the CPU.

Megatron's unfused form computes the pack's angles, cosines and sines again for queries and keys of
every layer, one slice per sequence. Here they are computed once per pack and stay with its offsets.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Kinds of layers whose angles a pack keeps; more would be those of forward passes that are over.
_KEPT = 4


class _Rotate(torch.autograd.Function):
    """x cos + rotate_half(x) sin, whose gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.angles = cos, sin, interleaved
        return _rotated(x, cos, sin, interleaved, sign=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _rotated(gradient, *ctx.angles, sign=-1), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, sign: int) -> Tensor:
    """x [T, H, D]; cos, sin [T, 1, R], R at most D: the components beyond R stay.

    Both components of a pair have the same angle. Pairs are (0, R/2), (1, R/2 + 1) ..., or
    interleaved (0, 1), (2, 3) ...
    """
    rotary = cos.shape[-1]
    first, second = slice(0, rotary // 2), slice(rotary // 2, rotary)
    if interleaved:
        first, second = slice(0, rotary, 2), slice(1, rotary, 2)
    if rotary == x.shape[-1]:
        out = x * cos
    else:
        out = x.clone(memory_format=torch.contiguous_format)
        out[..., :rotary].mul_(cos)
    out[..., first].addcmul_(x[..., second], sin[..., first], value=-sign)
    out[..., second].addcmul_(x[..., first], sin[..., second], value=sign)
    return out


def _angles(
    offsets: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, R] of every token's position in its sequence, kept on ``offsets``.

    Layers may use parts of one tensor of frequencies, so these are known by their memory, which
    is kept as long as the angles are.
    """
    kept = getattr(offsets, "_rotary", None)
    if kept is None:
        kept = offsets._rotary = {}  # type: ignore[attr-defined]
    key = (frequencies.data_ptr(), frequencies.shape, scale, dtype)
    if key not in kept:
        if len(kept) >= _KEPT:
            kept.clear()
        positions = _positions(offsets, len(frequencies))
        by_position = frequencies.squeeze(1)
        cos, sin = (
            by.mul_(scale)[positions].to(dtype) for by in (by_position.cos(), by_position.sin())
        )
        kept[key] = (frequencies, cos, sin)
    return kept[key][1:]


def _positions(offsets: Tensor, rows: int) -> Tensor:
    """[T] row of every token's frequencies: its position, or its own row where each has one."""
    tokens = torch.arange(int(offsets[-1]), device=offsets.device)
    if rows == len(tokens):
        return tokens
    lengths = (offsets[1:] - offsets[:-1]).long()
    return tokens - torch.repeat_interleave(offsets[:-1].long(), lengths)


def packed_rotary(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's ``apply_rotary_pos_emb`` with a quicker path for packs."""

    def apply(
        t: Tensor,
        freqs: Tensor,
        config: Any,
        cu_seqlens: Tensor | None = None,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:
        plain = config.context_parallel_size == 1 and not config.multi_latent_attention
        if cu_seqlens is None or not plain:
            return stock(t, freqs, config, cu_seqlens, mscale, cp_group)
        cos, sin = _angles(cu_seqlens, freqs, mscale, t.dtype)
        return _Rotate.apply(t, cos, sin, config.rotary_interleaved)  # type: ignore[return-value]

    return apply
