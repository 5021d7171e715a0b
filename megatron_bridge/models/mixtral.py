"""Mixtral: Llama whose every MLP is a choice of experts."""

from typing import Any

from megatron_bridge.models import dense, moe, windows
from megatron_bridge.registry import Architecture, HfConfig


def _always(_config: HfConfig, _layer: int) -> bool:
    return True


def _transformer(config: HfConfig) -> dict[str, Any]:
    return {
        **moe.transformer(
            config,
            count=config["num_local_experts"],
            width=config["intermediate_size"],
            is_moe=_always,
            normalized=True,
        ),
        **windows.transformer(config["sliding_window"], None),
    }


def _refusals(config: HfConfig) -> list[str]:
    made = {**_DEFAULTS, **config}
    return [
        *dense.refusals(_DEFAULTS)(config),
        *windows.size_problems(made["sliding_window"]),
        *moe.topk_problems(made, made["num_local_experts"], normalized=True),
    ]


_DEFAULTS = dense.DEFAULTS | {
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


ARCHITECTURES = (
    Architecture(
        name="MixtralForCausalLM",
        model_type="mixtral",
        rows=(
            dense.EMBEDDING,
            dense.INPUT_NORM,
            dense.QKV,
            dense.ATTENTION_OUTPUT,
            moe.EXPERTS_NORM,
            moe.router("block_sparse_moe.gate"),
            *moe.experts("block_sparse_moe.experts", "w1", "w3", "w2", width="ffn"),
            *dense.OUTPUT,
        ),
        transformer=_transformer,
        # Noise on the router's input, in training alone.
        required={"hidden_act": ("silu",), "router_jitter_noise": (0, 0.0)},
        defaults=_DEFAULTS,
        harmless=dense.HARMLESS | moe.HARMLESS,
        ignored=dense.IGNORED,
        extra_sizes=lambda config: {
            "expert": config["num_local_experts"],
            "routed": config["num_local_experts"],
        },
        is_moe=_always,
        features=dense.features,
        refusals=_refusals,
        models="Mixtral 8x7B, 8x22B",
    ),
)
