"""Qwen3, dense: Llama with a norm on each head's query and key."""

from megatron_bridge.models import dense, qwen2
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
        transformer=lambda config: {**qwen2.transformer(config), "qk_layernorm": True},
        required=dense.REQUIRED,
        defaults=qwen2.DEFAULTS | {"head_dim": 128},
        harmless=dense.HARMLESS,
        ignored=dense.IGNORED,
        features=dense.features,
        refusals=qwen2.refusals,
        models="Qwen3 0.6B to 32B",
    ),
)
