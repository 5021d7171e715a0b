"""Qwen3, dense: Llama with a norm on each head's query and key."""

from megatron_bridge.models import dense
from megatron_bridge.registry import Architecture

ARCHITECTURES = (
    Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        rows=(
            dense.EMBEDDING,
            dense.INPUT_NORM,
            dense.QKV,
            *dense.QK_NORM,
            dense.ATTENTION_OUTPUT,
            *dense.GATED_MLP,
            *dense.OUTPUT,
        ),
        transformer=lambda config: {**dense.transformer(config), "qk_layernorm": True},
        required=dense.REQUIRED,
        defaults=dense.DEFAULTS | {"head_dim": 128},
        harmless=dense.HARMLESS,
        ignored=dense.IGNORED,
        refusals=dense.rotary_problems,
    ),
)
