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
    rows,
    shared_down,
    shared_gate_up,
    stacked,
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
_ATTENTION_OUTPUT = Rule(f"{_ATTENTION}o_proj.weight", (f"{_ATTENTION}o_proj.weight",), columns)
_QK_NORMS = _whole(f"{_ATTENTION}q_norm.weight", f"{_ATTENTION}k_norm.weight")
_QKV_ATTENTION = (_qkv("weight"), _qkv("bias"), _ATTENTION_OUTPUT, *_QK_NORMS)
# What an MLP's gate and up, or q, k and v, are in a checkpoint that stacks them as well.
_STACKED_QKV = Rule(f"{_ATTENTION}qkv_proj.weight", (f"{_ATTENTION}qkv_proj.weight",), qkv)
_STACKED_MLP = (
    Rule(f"{_LAYER}mlp.gate_up_proj.weight", (f"{_LAYER}mlp.gate_up_proj.weight",), gate_up),
    Rule(f"{_LAYER}mlp.down_proj.weight", (f"{_LAYER}mlp.down_proj.weight",), down),
)
# Every norm of a layer; a rule holds where its tensors exist, and so do biases, norms of q and k,
# and the MLP of a layer with or without experts.
_NORMS = _whole(
    *(
        f"{_LAYER}{name}.weight"
        for name in (
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "post_mlp_layernorm",
        )
    )
)
_DENSE_MLP = _mlp(f"{_LAYER}mlp.")
_EXPERTS = _experts(f"{_LAYER}mlp.experts.", "gate_proj", "up_proj", "down_proj")

_DENSE = (_EMBEDDING, *_QKV_ATTENTION, *_DENSE_MLP, *_NORMS, *_OUTPUT)
# SGLang gives every layer experts, whatever mlp_only_layers and decoder_sparse_step say: the MLP of
# a layer without any has no place.
_QWEN_MOE = (
    _EMBEDDING,
    *_QKV_ATTENTION,
    *_whole(f"{_LAYER}mlp.gate.weight", f"{_LAYER}mlp.shared_expert_gate.weight"),
    *_EXPERTS,
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
_GEMMA3 = (*_whole("model.embed_tokens.weight"), *_DENSE[1:-1])
_GLM4 = (_EMBEDDING, *_QKV_ATTENTION, *_STACKED_MLP, *_NORMS, *_OUTPUT)
_PHI3 = (_EMBEDDING, _STACKED_QKV, _ATTENTION_OUTPUT, *_STACKED_MLP, *_NORMS, *_OUTPUT)

_QUERY_DOWN, _KEY_DOWN = f"{_ATTENTION}q_a_proj.weight", f"{_ATTENTION}kv_a_proj_with_mqa.weight"
_CORRECTION = f"{_LAYER}mlp.gate.e_score_correction_bias"
_SHARED = f"{_LAYER}mlp.shared_experts."
# Where queries are compressed, both projections down are one parameter. SGLang derives w_kc and
# w_vc from kv_b_proj after a load (`post_load_weights`); they are no parameters. On a GPU it must
# be started with --disable-shared-experts-fusion: else the shared expert is one more of the stack.
_DEEPSEEK = (
    _EMBEDDING,
    Rule(f"{_ATTENTION}q_proj.weight", (f"{_ATTENTION}q_proj.weight",), rows),
    Rule(f"{_ATTENTION}fused_qkv_a_proj_with_mqa.weight", (_QUERY_DOWN, _KEY_DOWN), stacked),
    Rule(_KEY_DOWN, (_KEY_DOWN,), whole, without=_QUERY_DOWN),
    *_whole(f"{_ATTENTION}q_a_layernorm.weight"),
    Rule(f"{_ATTENTION}q_b_proj.weight", (f"{_ATTENTION}q_b_proj.weight",), rows),
    Rule(f"{_ATTENTION}kv_b_proj.weight", (f"{_ATTENTION}kv_b_proj.weight",), rows),
    _ATTENTION_OUTPUT,
    *_whole(f"{_ATTENTION}kv_a_layernorm.weight"),
    *_DENSE_MLP,
    *_whole(f"{_LAYER}mlp.gate.weight"),
    Rule(_CORRECTION, (_CORRECTION,), whole, dtype="float32"),
    *_EXPERTS,
    Rule(
        f"{_SHARED}gate_up_proj.weight",
        (f"{_SHARED}gate_proj.weight", f"{_SHARED}up_proj.weight"),
        shared_gate_up,
    ),
    Rule(f"{_SHARED}down_proj.weight", (f"{_SHARED}down_proj.weight",), shared_down),
    *_NORMS,
    *_OUTPUT,
)

TABLES: dict[str, tuple[Rule, ...]] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Gemma3ForCausalLM": _GEMMA3,
    "Glm4ForCausalLM": _GLM4,
    "LlamaForCausalLM": _DENSE,
    "MistralForCausalLM": _DENSE,
    "MixtralForCausalLM": _MIXTRAL,
    "Olmo2ForCausalLM": _DENSE,
    "Phi3ForCausalLM": _PHI3,
    "Qwen2ForCausalLM": _DENSE,
    "Qwen2MoeForCausalLM": _QWEN_MOE,
    "Qwen3ForCausalLM": _DENSE,
    "Qwen3MoeForCausalLM": _QWEN_MOE,
}
