"""A decoder's forward pass over the server's fused parameters, with a preallocated KV cache.

Letters: B rows, T prompt tokens, L cached tokens, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridflow.rollout.local.geometry import check_supported, eos_ids, geometry
from hybridflow.rollout.local.moe import make_mlp
from hybridflow.rollout.local.weights import empty_parameters, load_into
from hybridflow.weight_sync.version import read_config


class KVCache:
    """Keys and values of running rows: two tensors [layers, rows, G, tokens, D] that grow."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._shape = (layers, 0, kv_heads, 0, head_dim)
        self.keys = torch.empty(self._shape, dtype=dtype)
        self.values = torch.empty(self._shape, dtype=dtype)

    def reserve(self, rows: int, tokens: int, used_rows: int) -> None:
        """Make room for `rows` x `tokens`; the first `used_rows` rows keep what they hold."""
        layers, have_rows, kv_heads, have_tokens, head_dim = self.keys.shape
        if rows <= have_rows and tokens <= have_tokens:
            return
        rows, tokens = max(rows, have_rows), max(_round_up(tokens, 64), have_tokens)
        shape = (layers, rows, kv_heads, tokens, head_dim)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = torch.zeros(shape, dtype=old.dtype)
            new[:, :used_rows, :, :have_tokens] = old[:, :used_rows]
            setattr(self, name, new)

    def fill(self, row_B: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put prefilled keys and values [layers, B, G, T, D] at the start of the rows `row_B`."""
        tokens = keys.shape[3]
        self.keys[:, row_B, :, :tokens] = keys
        self.values[:, row_B, :, :tokens] = values

    def move(self, source_B: torch.Tensor, target_B: torch.Tensor, tokens: int) -> None:
        """Copy the first `tokens` tokens of rows `source_B` over rows `target_B`."""
        for cache in (self.keys, self.values):
            cache[:, target_B, :, :tokens] = cache[:, source_B, :, :tokens]

    def clear(self) -> None:
        """Give the memory back."""
        self.keys = self.keys.new_empty(self._shape)
        self.values = self.values.new_empty(self._shape)


class Decoder:
    """A decoder on one process. Every method runs under inference mode."""

    def __init__(self, folder: str | Path, dtype: torch.dtype) -> None:
        self.folder = Path(folder)
        self.raw_config = read_config(folder)
        self.geometry = geometry(self.raw_config)
        self.dtype = dtype
        hf_config = AutoConfig.from_pretrained(folder, local_files_only=True)
        check_supported(hf_config)
        self.context_length: int = hf_config.max_position_embeddings
        self.eps: float = hf_config.rms_norm_eps
        self.rotary = _RotaryTable(hf_config, dtype)
        self.eos_ids = eos_ids(folder)
        self.parameters = empty_parameters(self.raw_config, dtype)
        self.update(folder)

    def update(self, folder: str | Path) -> None:
        """Load other weights of the same shapes in place. ValueError: nothing has changed."""
        with torch.inference_mode():
            load_into(self.parameters, folder, self.raw_config)
            self.bind()

    def bind(self) -> None:
        """Collect each layer's tensors, after their values changed: a step looks no name up."""
        g, p = self.geometry, self.parameters
        self._embedding = p["model.embed_tokens.weight"]
        head = self._embedding if g.tied else p["lm_head.weight"]
        self._head = head[: g.vocab]
        self._final_norm = p["model.norm.weight"]
        self._layers = [_Layer(p, f"model.layers.{index}.", self) for index in range(g.layers)]

    def new_cache(self) -> KVCache:
        """An empty cache of this model's shape."""
        g = self.geometry
        return KVCache(g.layers, g.kv_heads, g.head_dim, self.dtype)

    @torch.inference_mode()
    def prefill(self, ids_BT: torch.Tensor, lengths_B: torch.Tensor):
        """Run right-padded prompts; causal attention keeps padding out of every real token.

        Returns the logits [B, V] (float32) after each prompt's last token, and the keys and
        values [layers, B, G, T, D], whose padded places hold values that decoding overwrites.
        """
        g = self.geometry
        rows, tokens = ids_BT.shape
        x = F.embedding(ids_BT, self._embedding)
        cos, sin = self.rotary.rows(torch.arange(tokens))
        shape = (g.layers, rows, g.kv_heads, tokens, g.head_dim)
        keys, values = torch.empty(shape, dtype=self.dtype), torch.empty(shape, dtype=self.dtype)
        for index, layer in enumerate(self._layers):
            q, k, v = layer.qkv(x, cos[:, None], sin[:, None])
            keys[index], values[index] = k.transpose(1, 2), v.transpose(1, 2)
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                keys[index],
                values[index],
                is_causal=True,
                enable_gqa=g.heads != g.kv_heads,
            )
            x = layer.finish(x, out.transpose(1, 2).reshape(rows, tokens, -1))
        last = x[torch.arange(rows), lengths_B - 1]
        return self._logits(last), keys, values

    @torch.inference_mode()
    def decode(
        self, token_B: torch.Tensor, position_B: torch.Tensor, length: int, cache: KVCache
    ) -> torch.Tensor:
        """One token for rows 0..B-1 of the cache, at `position_B`; returns logits [B, V] float32.

        `length` is the longest row's token count with this token. Equal positions need no mask.
        """
        g = self.geometry
        rows = token_B.shape[0]
        x = F.embedding(token_B, self._embedding)
        cos, sin = self.rotary.rows(position_B)
        cos, sin = cos[:, None], sin[:, None]
        even = int(position_B.min()) + 1 == length
        mask = None if even else self._mask(position_B, length)
        row_B = torch.arange(rows)
        for index, layer in enumerate(self._layers):
            q, k, v = layer.qkv(x, cos, sin)
            keys, values = cache.keys[index], cache.values[index]
            if even:
                keys[:rows, :, length - 1], values[:rows, :, length - 1] = k, v
            else:
                keys[row_B, :, position_B], values[row_B, :, position_B] = k, v
            q = q.view(rows, g.kv_heads, g.heads // g.kv_heads, g.head_dim)
            out = _attend(q, keys[:rows, :, :length], values[:rows, :, :length], mask)
            x = layer.finish(x, out.reshape(rows, -1))
        return self._logits(x)

    def _mask(self, position_B: torch.Tensor, length: int) -> torch.Tensor:
        """[B, G, 1, L]: 0 where a row has a token, -inf beyond its position."""
        hidden = torch.arange(length) > position_B[:, None]
        mask = torch.zeros(len(position_B), 1, 1, length, dtype=self.dtype)
        mask.masked_fill_(hidden[:, None, None], float("-inf"))
        return mask.expand(-1, self.geometry.kv_heads, -1, -1)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(rms_norm(x, self._final_norm, self.eps), self._head).float()


class _Layer:
    """One decoder block's tensors and its two halves around attention."""

    def __init__(self, p: dict[str, torch.Tensor], prefix: str, model: Decoder) -> None:
        g = model.geometry
        attention = prefix + "self_attn."
        self.eps, self.heads, self.kv_heads = model.eps, g.heads, g.kv_heads
        self.head_dim = g.head_dim
        self.input_norm = p[prefix + "input_layernorm.weight"]
        self.post_norm = p[prefix + "post_attention_layernorm.weight"]
        self.qkv_weight = p[attention + "qkv_proj.weight"]
        self.qkv_bias = p.get(attention + "qkv_proj.bias")
        self.o_proj = p[attention + "o_proj.weight"]
        self.mlp = make_mlp(p, prefix, g.routing)
        self.qk_norm = None
        if attention + "q_norm.weight" in p:
            q, k = p[attention + "q_norm.weight"], p[attention + "k_norm.weight"]
            self.qk_norm = torch.cat([q.expand(g.heads, -1), k.expand(g.kv_heads, -1)])

    def qkv(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """Rotated q [..., H, D] and k [..., G, D], and v [..., G, D]."""
        x = rms_norm(x, self.input_norm, self.eps)
        fused = F.linear(x, self.qkv_weight, self.qkv_bias)
        fused = fused.view(*x.shape[:-1], -1, self.head_dim)
        qk, v = fused.split([self.heads + self.kv_heads, self.kv_heads], dim=-2)
        if self.qk_norm is not None:
            qk = rms_norm(qk, self.qk_norm, self.eps)
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
        q, k = qk.split([self.heads, self.kv_heads], dim=-2)
        return q, k, v

    def finish(self, x: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP, each with its residual."""
        x = x + F.linear(attention, self.o_proj)
        return x + self.mlp(rms_norm(x, self.post_norm, self.eps))


class _RotaryTable:
    """cos and sin per position, [positions, D]; sin's first half is negated.

    So rotating is x * cos + roll(x, D/2) * sin, without building the rotated half.
    """

    def __init__(self, hf_config, dtype: torch.dtype) -> None:
        self._frequencies, self._scale = _inverse_frequencies(hf_config)
        self._dtype = dtype
        self._make(256)

    def _make(self, positions: int) -> None:
        angles = torch.arange(positions).float()[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        self._cos = torch.cat([cos, cos], -1).to(self._dtype)
        self._sin = torch.cat([-sin, sin], -1).to(self._dtype)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [len(positions), D]."""
        last = int(positions.max())
        if last >= self._cos.shape[0]:
            self._make(2 * (last + 1))
        return self._cos[positions], self._sin[positions]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One query token per row: q [B, G, H/G, D] over k and v [B, G, L, D].

    In float32 two batched products are twice as quick as the fused kernel for so short a query;
    below that the fused kernel keeps its scores in float32.
    """
    if q.dtype != torch.float32:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    rows, kv_heads, group, size = q.shape
    batch, length = rows * kv_heads, k.shape[2]
    bias = q.new_zeros(1) if mask is None else mask.reshape(batch, 1, length)
    scores = torch.baddbmm(
        bias.expand(batch, group, length),
        q.reshape(batch, group, size),
        k.flatten(0, 1).transpose(1, 2),
        beta=0 if mask is None else 1,
        alpha=size**-0.5,
    )
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis, its scale computed in float32."""
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
    return (wide * scale).to(x.dtype) * weight


def _inverse_frequencies(hf_config) -> tuple[torch.Tensor, float]:
    """Rotary frequencies [D/2], and the factor on cos and sin, by transformers' own rules."""
    rope = hf_config.rope_parameters
    if rope["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf_config)
    size = getattr(hf_config, "head_dim", None)
    size = size or hf_config.hidden_size // hf_config.num_attention_heads
    steps = torch.arange(0, size, 2, dtype=torch.float32) / size
    return 1.0 / (rope["rope_theta"] ** steps), 1.0


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple
