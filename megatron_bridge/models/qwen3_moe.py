"""Qwen3-MoE: Qwen3 with experts."""

from typing import Any

from megatron_bridge.models import dense, moe, windows
from megatron_bridge.models.qwen2_moe import LAYERS, is_moe
from megatron_bridge.registry import Architecture, HfConfig


def _experts(config: HfConfig) -> int:
    """Their number: published files say ``num_experts``, transformers 5 ``num_local_experts``."""
    return config.get("num_experts") or config.get("num_local_experts") or 128


def _window(config: HfConfig) -> int | None:
    return config["sliding_window"] if config["use_sliding_window"] else None


def _transformer(config: HfConfig) -> dict[str, Any]:
    return {
        **moe.transformer(
            config,
            count=_experts(config),
            width=config["moe_intermediate_size"],
            is_moe=is_moe,
            normalized=config["norm_topk_prob"],
        ),
        **windows.transformer(_window(config), None),
        "qk_layernorm": True,
    }


def _refusals(config: HfConfig) -> list[str]:
    made = {**_DEFAULTS, **config}
    found = [
        *dense.refusals(_DEFAULTS)(config),
        *windows.size_problems(_window(made)),
        *moe.topk_problems(made, _experts(made), normalized=made["norm_topk_prob"]),
    ]
    both = {made["num_experts"], made["num_local_experts"]} - {None}
    if len(both) > 1:
        found.append(f"num_experts and num_local_experts disagree: {sorted(both)}; keep one")
    return found


_DEFAULTS = (
    dense.DEFAULTS
    | LAYERS
    | {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts": None,
        "num_local_experts": None,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "moe_intermediate_size": 768,
    }
)

ARCHITECTURES = (
    Architecture(
        name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        rows=(
            dense.EMBEDDING,
            dense.INPUT_NORM,
            dense.QKV,
            *dense.QK_NORM,
            dense.ATTENTION_OUTPUT,
            *moe.DENSE_MLP,
            moe.EXPERTS_NORM,
            moe.router("mlp.gate"),
            *moe.EXPERTS,
            *dense.OUTPUT,
        ),
        transformer=_transformer,
        required={"hidden_act": ("silu",), "attention_bias": (False,)},
        defaults=_DEFAULTS,
        harmless=dense.HARMLESS | moe.HARMLESS | {"max_window_layers"},
        ignored=dense.IGNORED,
        extra_sizes=lambda config: {
            "expert": _experts(config),
            "routed": _experts(config),
            "moe_ffn": config["moe_intermediate_size"],
        },
        is_moe=is_moe,
        features=dense.features,
        refusals=_refusals,
        models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    ),
)
