"""Causal attention over packed sequences (THD), without transformer-engine.

A pack holds sequences of different lengths one after the other. One kernel call per sequence is
slow when a pack holds hundreds of short ones, so sequences of similar length share a call: each is
padded on the right to the longest of its bucket, inside the attention alone. Under a causal mask a
real query never sees the padding behind it, so no further mask is needed.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide
from torch import Tensor

from megatron_bridge.runtime import device
from megatron_bridge.runtime.attention_kernel import Form, Masks, attend
from megatron_bridge.runtime.module_groups import replicas, tensor_ranks

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
        masks: of the layers that need other masks than the plain causal one.
    """

    buckets: list[Bucket]
    scatter: Tensor | None
    masks: Masks = field(default_factory=Masks)


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


_PLAIN = Form()


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, plan_: Plan, scale: float, form: Form = _PLAIN
) -> Tensor:
    """Causal attention within each sequence of a pack.

    Args:
        q: [T, heads, head_dim]; k: [T, kv_heads, head_dim]; v: [T, kv_heads, value_dim].

    Returns:
        [T, heads, value_dim]
    """
    if plan_.scatter is None:
        return _of_bucket(q, k, v, plan_, 0, scale, form)
    q_rows, k_rows, v_rows = (_Gather.apply(x, plan_) for x in (q, k, v))
    rows = [
        _of_bucket(q_rows[i], k_rows[i], v_rows[i], plan_, i, scale, form)  # type: ignore[index]
        for i in range(len(plan_.buckets))
    ]
    return _Scatter.apply(plan_, *rows)  # type: ignore[return-value]


def _of_bucket(
    q: Tensor, k: Tensor, v: Tensor, plan_: Plan, index: int, scale: float, form: Form
) -> Tensor:
    """Attention of one bucket: q [B*L, H, D], k [B*L, K, D], v [B*L, K, V] -> [B*L, H, V]."""
    bucket = plan_.buckets[index]
    shape = (bucket.rows, bucket.length)
    q, k, v = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = attend(q, k, v, scale, form, plan_.masks)
    return out.transpose(1, 2).reshape(bucket.rows * bucket.length, *out.shape[1::2])


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
    """Causal core attention for Megatron's SelfAttention and MLASelfAttention, on CPU or GPU.

    Takes packed sequences (``packed_seq_params``, THD) or a rectangular batch without padding.
    Sliding windows and sinks follow the TransformerConfig (``window_size``,
    ``window_attn_skip_freq``, ``softmax_type``), as in transformer-engine, and the sinks have its
    name, ``softmax_offset``.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if attention_dropout or config.attention_dropout:
            raise ValueError("attention dropout is not supported; set attention_dropout=0")
        if config.context_parallel_size != 1:
            raise ValueError("context parallelism needs transformer-engine; use cp=1 without it")
        head_dim = config.kv_channels if k_channels is None else k_channels
        self.scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
        self.window = _window(config, layer_number)
        self.softmax_offset = _sinks(config, pg_collection)
        self.groups = pg_collection

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
        """[T, H, D] -> [T, H * V] when packed, else [S, B, H, D] -> [S, B, H * V]."""
        if attention_mask is not None:
            raise ValueError("attention masks are not supported; pack the sequences (THD) instead")
        form = Form(self.window, self.softmax_offset)
        if packed_seq_params is not None:
            plan_ = _plan_of(packed_seq_params, query.device)
            return packed_attention(query, key, value, plan_, self.scale, form).flatten(1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return attend(q, k, v, self.scale, form, Masks()).permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """The sinks, cut over tensor parallelism by heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=tensor_ranks(self.groups),
            dp_cp_group=replicas(metadata),
        )


def _window(config: Any, layer_number: int) -> int | None:
    """How many tokens a query of this layer sees, itself included; None: all before it."""
    size, frequency = config.window_size, config.window_attn_skip_freq
    if not is_layer_window_attention(size, frequency, layer_number) or size[0] < 0:
        return None
    return size[0] + 1


def _sinks(config: Any, groups: Any) -> torch.nn.Parameter | None:
    """A learnable logit for each of this rank's heads, where the config asks for them."""
    if config.softmax_type == "vanilla":
        return None
    if config.softmax_type != "learnable":
        raise ValueError(f"softmax_type='{config.softmax_type}' is not supported; use 'learnable'")
    per_rank = divide(config.num_attention_heads, tensor_ranks(groups).size())
    empty = torch.empty(per_rank, device=device.device(), dtype=config.params_dtype)
    sinks = torch.nn.Parameter(empty)
    set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    if config.perform_initialization:
        tracker = get_cuda_rng_tracker()
        assert tracker is not None
        with tracker.fork():
            config.init_method(sinks)
    return sinks
