"""Causal attention over packed sequences (THD), without transformer-engine.

A pack holds sequences of different lengths one after the other. One kernel call per sequence is
slow when a pack holds hundreds of short ones, so sequences of similar length share a call: each is
padded on the right to the longest of its bucket, inside the attention alone. Under a causal mask a
real query never sees the padding behind it, so no further mask is needed.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

# A shorter sequence joins a bucket while it fills this share of the bucket's length ...
_FILL = 0.75
# ... or lacks at most this many tokens, where a kernel call costs more than the padding.
_SLACK = 16


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, as rows of a padded matrix.

    Attributes:
        rows: number of sequences B.
        length: their padded length L.
        gather: [B * L] token of the pack at each place; places of padding repeat a real token.
        padding: [B * L] True at padding; None when there is none.
    """

    rows: int
    length: int
    gather: Tensor
    padding: Tensor | None


@dataclass(frozen=True)
class Plan:
    """How a pack is cut into buckets.

    Attributes:
        buckets: in order of falling length.
        scatter: [T] place of each token in the concatenated buckets; None when the pack already is
            one bucket without padding, so that views serve.
    """

    buckets: list[Bucket]
    scatter: Tensor | None


def plan(lengths: list[int], device: torch.device) -> Plan:
    """Cut a pack of sequences with these lengths into buckets."""
    total = sum(lengths)
    if len(set(lengths)) == 1:
        everything = torch.arange(total, device=device)
        return Plan([Bucket(len(lengths), lengths[0], everything, None)], None)
    lengths_N = torch.tensor(lengths)
    starts_N = lengths_N.cumsum(0) - lengths_N
    buckets, scatter_T, offset = [], torch.empty(total, dtype=torch.long), 0
    for members in _similar(lengths):
        bucket, tokens, places = _bucket(lengths_N[members], starts_N[members], device)
        scatter_T[tokens] = places + offset
        offset += bucket.rows * bucket.length
        buckets.append(bucket)
    return Plan(buckets, scatter_T.to(device))


def _similar(lengths: list[int]) -> list[list[int]]:
    """Indices of sequences, grouped by similar length."""
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if groups and (length >= _FILL * longest or longest - length <= _SLACK):
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = length
    return groups


def _bucket(
    lengths_B: Tensor, starts_B: Tensor, device: torch.device
) -> tuple[Bucket, Tensor, Tensor]:
    """A bucket, with its real tokens in the pack and their places in the bucket."""
    rows, length = len(lengths_B), int(lengths_B.max())
    position_L = torch.arange(length)
    real_BL = position_L < lengths_B[:, None]
    gather_BL = starts_B[:, None] + torch.minimum(position_L, lengths_B[:, None] - 1)
    padding = None if bool(real_BL.all()) else (~real_BL).flatten().to(device)
    bucket = Bucket(rows, length, gather_BL.flatten().to(device), padding)
    return bucket, gather_BL[real_BL], real_BL.flatten().nonzero().squeeze(1)


class _Gather(torch.autograd.Function):
    """tokens [T, ...] -> padded rows; the padding's gradient is exactly zero and is dropped."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, plan_: Plan) -> tuple[Tensor, ...]:
        ctx.scatter = plan_.scatter
        return tuple(tokens.index_select(0, bucket.gather) for bucket in plan_.buckets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        joined = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        return joined.index_select(0, ctx.scatter), None


class _Scatter(torch.autograd.Function):
    """Padded rows -> tokens [T, ...]; padding gets no gradient."""

    @staticmethod
    def forward(ctx: Any, plan_: Plan, *rows: Tensor) -> Tensor:
        ctx.plan = plan_
        joined = rows[0] if len(rows) == 1 else torch.cat(rows)
        assert plan_.scatter is not None
        return joined.index_select(0, plan_.scatter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        gradients = []
        for bucket in ctx.plan.buckets:
            rows = gradient.index_select(0, bucket.gather)
            if bucket.padding is not None:
                rows[bucket.padding] = 0
            gradients.append(rows)
        return None, *gradients


def _causal(q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, scale: float) -> Tensor:
    """Attention of one bucket: q [B*L, H, D], k and v [B*L, K, D] -> [B*L, H, D]."""
    shape = (bucket.rows, bucket.length)
    q, k, v = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).reshape(bucket.rows * bucket.length, *out.shape[1::2])


def packed_attention(q: Tensor, k: Tensor, v: Tensor, plan_: Plan, scale: float) -> Tensor:
    """Causal attention within each sequence of a pack.

    Args:
        q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim].

    Returns:
        [T, heads, head_dim]
    """
    if plan_.scatter is None:
        return _causal(q, k, v, plan_.buckets[0], scale)
    q_rows, k_rows, v_rows = (_Gather.apply(x, plan_) for x in (q, k, v))
    rows = [
        _causal(q_rows[i], k_rows[i], v_rows[i], bucket, scale)  # type: ignore[index]
        for i, bucket in enumerate(plan_.buckets)
    ]
    return _Scatter.apply(plan_, *rows)  # type: ignore[return-value]


def _plan_of(packed: PackedSeqParams, device: torch.device) -> Plan:
    """The pack's plan, made once and kept with the pack: every layer uses it."""
    known = getattr(packed, "_attention_plan", None)
    if known is None:
        offsets = packed.cu_seqlens_q
        assert offsets is not None
        known = plan((offsets[1:] - offsets[:-1]).tolist(), device)
        packed._attention_plan = known  # type: ignore[attr-defined]
    return known


class CoreAttention(MegatronModule):
    """Causal core attention for Megatron's SelfAttention, on CPU or GPU.

    Takes packed sequences (``packed_seq_params``, THD) or a rectangular batch without padding.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_unused: Any) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError("attention dropout is not supported; set attention_dropout=0")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: Any,
    ) -> Tensor:
        """[T, H, D] -> [T, H * D] when packed, else [S, B, H, D] -> [S, B, H * D]."""
        if attention_mask is not None:
            raise ValueError("attention masks are not supported; pack the sequences (THD) instead")
        if packed_seq_params is not None:
            plan_ = _plan_of(packed_seq_params, query.device)
            return packed_attention(query, key, value, plan_, self.scale).flatten(1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)
