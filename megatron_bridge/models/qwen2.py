"""Qwen2 and Qwen2.5, dense: Llama with a bias on q, k and v."""

from megatron_bridge.models import dense
from megatron_bridge.registry import Architecture

ARCHITECTURES = (
    Architecture(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        rows=(
            dense.EMBEDDING,
            dense.INPUT_NORM,
            dense.QKV,
            dense.QKV_BIAS,
            dense.ATTENTION_OUTPUT,
            *dense.GATED_MLP,
            *dense.OUTPUT,
        ),
        transformer=lambda config: {**dense.transformer(config), "add_qkv_bias": True},
        required=dense.REQUIRED,
        defaults=dense.DEFAULTS,
        harmless=dense.HARMLESS,
        ignored=dense.IGNORED,
        refusals=dense.rotary_problems,
    ),
)
