"""Qwen2 and Qwen2.5, dense: Llama with a bias on q, k and v, and late layers with a window."""

from typing import Any

from megatron_bridge.models import dense, windows
from megatron_bridge.registry import Architecture, HfConfig

DEFAULTS = dense.DEFAULTS | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def transformer(config: HfConfig) -> dict[str, Any]:
    """TransformerConfig's arguments of Qwen2's and Qwen3's layers."""
    return dense.transformer(config) | windows.transformer(*windows.qwen(config))


def refusals(config: HfConfig) -> list[str]:
    """Further reasons why such a model is not supported."""
    return dense.refusals(DEFAULTS)(config) + windows.problems(
        config, *windows.qwen({**DEFAULTS, "num_hidden_layers": 0, **config})
    )


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
        transformer=lambda config: {**transformer(config), "add_qkv_bias": True},
        required=dense.REQUIRED,
        defaults=DEFAULTS,
        harmless=dense.HARMLESS,
        ignored=dense.IGNORED,
        features=dense.features,
        refusals=refusals,
        models="Qwen2, Qwen2.5",
    ),
)
