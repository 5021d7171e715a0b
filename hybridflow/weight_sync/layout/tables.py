"""The parameters of each architecture in an SGLang server. Tables only; imports no torch."""

from __future__ import annotations

from hybridflow.weight_sync.layout.rules import (
    Rule,
    columns,
    down,
    experts_down,
    experts_gate_up,
    gate_up,
    qkv,
    vocabulary,
    whole,
)

_LAYER = "model.layers.{layer}."
_ATTENTION = f"{_LAYER}self_attn."


def _whole(*names: str) -> tuple[Rule, ...]:
    return tuple(Rule(name, (name,), whole) for name in names)


def _qkv(kind: str) -> Rule:
    parts = tuple(f"{_ATTENTION}{part}_proj.{kind}" for part in "qkv")
    return Rule(f"{_ATTENTION}qkv_proj.{kind}", parts, qkv)


def _mlp(module: str) -> tuple[Rule, ...]:
    """A gated MLP under `module`, whose gate and up the server keeps in one parameter."""
    gate, up, out = (f"{module}{part}_proj.weight" for part in ("gate", "up", "down"))
    return (
        Rule(f"{module}gate_up_proj.weight", (gate, up), gate_up),
        Rule(out, (out,), down),
    )


def _experts(module: str, gate: str, up: str, out: str) -> tuple[Rule, ...]:
    """The experts under `module`, stacked."""
    one = f"{module}{{expert}}."
    return (
        Rule(f"{module}w13_weight", (f"{one}{gate}.weight", f"{one}{up}.weight"), experts_gate_up),
        Rule(f"{module}w2_weight", (f"{one}{out}.weight",), experts_down),
    )


_EMBEDDING = Rule("model.embed_tokens.weight", ("model.embed_tokens.weight",), vocabulary)
_OUTPUT = (
    *_whole("model.norm.weight"),
    Rule("lm_head.weight", ("lm_head.weight",), vocabulary),
)
_QKV_ATTENTION = (
    _qkv("weight"),
    _qkv("bias"),
    Rule(f"{_ATTENTION}o_proj.weight", (f"{_ATTENTION}o_proj.weight",), columns),
    *_whole(f"{_ATTENTION}q_norm.weight", f"{_ATTENTION}k_norm.weight"),
)
_NORMS = _whole(f"{_LAYER}input_layernorm.weight", f"{_LAYER}post_attention_layernorm.weight")
_DENSE_MLP = _mlp(f"{_LAYER}mlp.")

# A rule holds where its tensors exist: biases, norms of q and k, layers without experts.
_DENSE = (_EMBEDDING, *_QKV_ATTENTION, *_DENSE_MLP, *_NORMS, *_OUTPUT)
_QWEN_MOE = (
    _EMBEDDING,
    *_QKV_ATTENTION,
    *_DENSE_MLP,
    *_whole(f"{_LAYER}mlp.gate.weight", f"{_LAYER}mlp.shared_expert_gate.weight"),
    *_experts(f"{_LAYER}mlp.experts.", "gate_proj", "up_proj", "down_proj"),
    *_mlp(f"{_LAYER}mlp.shared_expert."),
    *_NORMS,
    *_OUTPUT,
)
_MIXTRAL = (
    _EMBEDDING,
    *_QKV_ATTENTION,
    *_whole(f"{_LAYER}block_sparse_moe.gate.weight"),
    *_experts(f"{_LAYER}block_sparse_moe.experts.", "w1", "w3", "w2"),
    *_NORMS,
    *_OUTPUT,
)

TABLES: dict[str, tuple[Rule, ...]] = {
    "LlamaForCausalLM": _DENSE,
    "MistralForCausalLM": _DENSE,
    "MixtralForCausalLM": _MIXTRAL,
    "Qwen2ForCausalLM": _DENSE,
    "Qwen2MoeForCausalLM": _QWEN_MOE,
    "Qwen3ForCausalLM": _DENSE,
    "Qwen3MoeForCausalLM": _QWEN_MOE,
}
