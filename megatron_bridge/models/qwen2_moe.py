"""Qwen2-MoE: Qwen2 with experts, and one gated expert that every token passes."""

from typing import Any

from megatron_bridge.models import dense, moe, windows
from megatron_bridge.registry import Architecture, HfConfig, Part, Row

# Qwen2-MoE and Qwen3-MoE say in these which layers have experts.
LAYERS: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": None}


def is_moe(config: HfConfig, layer: int) -> bool:
    """Every so many layers, but for those that are listed."""
    without = config["mlp_only_layers"] or ()
    return layer not in without and (layer + 1) % config["decoder_sparse_step"] == 0


def _qkv_bias(config: HfConfig) -> bool:
    return bool(config["qkv_bias"])


def _transformer(config: HfConfig) -> dict[str, Any]:
    return {
        **moe.transformer(
            config,
            count=config["num_experts"],
            width=config["moe_intermediate_size"],
            is_moe=is_moe,
            normalized=config["norm_topk_prob"],
        ),
        **windows.transformer(*_windows(config)),
        "add_qkv_bias": _qkv_bias(config),
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


def _windows(config: HfConfig) -> tuple[int | None, list[str]]:
    """Window and kinds of layers: every second layer before ``max_window_layers`` has one."""
    layers = config["num_hidden_layers"]
    window = config["sliding_window"] if config["use_sliding_window"] else None
    kinds = config["layer_types"] or [
        windows.SLIDING
        if window is not None and layer % 2 == 0 and layer < config["max_window_layers"]
        else "full_attention"
        for layer in range(layers)
    ]
    return window, list(kinds)


def _refusals(config: HfConfig) -> list[str]:
    made = {**_DEFAULTS, **config}
    return [
        *dense.refusals(_DEFAULTS)(config),
        *windows.problems(made, *_windows(made)),
        *moe.topk_problems(made, made["num_experts"], normalized=made["norm_topk_prob"]),
    ]


_DEFAULTS = (
    dense.DEFAULTS
    | LAYERS
    | {
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }
)

ARCHITECTURES = (
    Architecture(
        name="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        rows=(
            dense.EMBEDDING,
            dense.INPUT_NORM,
            dense.QKV,
            Row(
                dense.QKV_BIAS.megatron,
                dense.QKV_BIAS.shape,
                dense.QKV_BIAS.parts,
                cut=dense.QKV_BIAS.cut,
                when=_qkv_bias,
            ),
            dense.ATTENTION_OUTPUT,
            *moe.DENSE_MLP,
            moe.EXPERTS_NORM,
            moe.router("mlp.gate"),
            *moe.EXPERTS,
            *moe.shared("mlp.shared_expert"),
            Row(
                f"{moe.DECODER}mlp.shared_experts.gate_weight",
                "one, hidden",
                (Part(f"{moe.LAYER}mlp.shared_expert_gate.weight", "one, hidden"),),
                layers="moe",
            ),
            *dense.OUTPUT,
        ),
        transformer=_transformer,
        required={"hidden_act": ("silu",)},
        defaults=_DEFAULTS,
        harmless=dense.HARMLESS | moe.HARMLESS,
        ignored=dense.IGNORED,
        extra_sizes=lambda config: {
            "expert": config["num_experts"],
            "routed": config["num_experts"],
            "moe_ffn": config["moe_intermediate_size"],
            "shared_ffn": config["shared_expert_intermediate_size"],
            "one": 1,
        },
        is_moe=is_moe,
        features=dense.features,
        refusals=_refusals,
        models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    ),
)
