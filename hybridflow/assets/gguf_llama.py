"""Weights of a Llama in GGUF form as HuggingFace tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def hf_name(name: str) -> str:
    """HuggingFace's name of a GGUF tensor: ``blk.3.attn_q.weight`` is a query projection."""
    if name in _OUTER:
        return _OUTER[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    if not name.startswith("blk.") or rest not in _BLOCK:
        raise ValueError(f"GGUF tensor '{name}' is none of a Llama's")
    return f"model.layers.{block}.{_BLOCK[rest]}"


def read_weights(path: Path, heads: int, kv_heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight, dequantised to float32, one at a time, under its HuggingFace name."""
    import torch
    from gguf import GGUFReader, dequantize

    for tensor in GGUFReader(path).tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            values = halves(values, heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = halves(values, kv_heads)
        yield hf_name(tensor.name), torch.tensor(values, dtype=torch.float32)


def halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from rotary pairs side by side (GGUF) to two halves (HuggingFace).

    [heads * (dim / 2) * 2, hidden] -> [heads * 2 * (dim / 2), hidden]. With heads of four rows,
    rows 0 1 2 3 become 0 2 1 3.
    """
    paired = values.reshape(heads, -1, 2, values.shape[-1])
    return paired.swapaxes(1, 2).reshape(values.shape)
