"""DeepSeek-V2 and V3: latent attention, shared experts, dense first layers.

Kimi-K2 and Moonlight are V3.
"""

from typing import Any

from megatron_bridge.models import dense, latent, moe
from megatron_bridge.registry import Architecture, HfConfig, Part, Row

_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "n_group": None,
    "topk_group": None,
    "routed_scaling_factor": 1.0,
}
_V2 = dense.DEFAULTS | latent.DEFAULTS | _EXPERTS | {"topk_method": "greedy"}
_V3 = (
    dense.DEFAULTS
    | latent.DEFAULTS
    | _EXPERTS
    | {
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    }
)


def is_moe(config: HfConfig, layer: int) -> bool:
    """Every layer after the dense ones."""
    return layer >= config["first_k_dense_replace"]


def _groups(config: HfConfig) -> tuple[int, int] | None:
    """Number of groups and of those a token may choose from; None where it chooses from all."""
    groups, chosen = config["n_group"], config["topk_group"]
    limited = config.get("topk_method", "noaux_tc") != "greedy"
    return (groups, chosen) if limited and groups and chosen and chosen < groups else None


def _sizes(config: HfConfig) -> dict[str, int]:
    width = config["moe_intermediate_size"]
    return latent.sizes(config) | {
        "expert": config["n_routed_experts"],
        "routed": config["n_routed_experts"],
        "moe_ffn": width,
        "shared_ffn": width * config["n_shared_experts"],
    }


def _transformer(config: HfConfig) -> dict[str, Any]:
    groups = _groups(config) or (None, None)
    return {
        **moe.transformer(
            config,
            count=config["n_routed_experts"],
            width=config["moe_intermediate_size"],
            is_moe=is_moe,
            normalized=False,
        ),
        **latent.transformer(config),
        "moe_shared_expert_intermediate_size": _sizes(config)["shared_ffn"],
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        "moe_router_num_groups": groups[0],
        "moe_router_group_topk": groups[1],
    }


def _v3_transformer(config: HfConfig) -> dict[str, Any]:
    return {
        **_transformer(config),
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # The bias moves only where a recipe asks for it.
        "moe_router_bias_update_rate": 0.0,
    }


def _problems(config: HfConfig) -> list[str]:
    """``config`` with defaults: why the experts are not supported."""
    count, topk = config["n_routed_experts"], config["num_experts_per_tok"]
    found = [*latent.problems(config), *moe.topk_problems(config, count, normalized=False)]
    if not config["routed_scaling_factor"]:
        found.append("routed_scaling_factor=0 would silence every expert")
    if (config["topk_group"] or 0) > (config["n_group"] or 0) > 0:
        found.append(f"topk_group={config['topk_group']} is more than n_group={config['n_group']}")
    groups = _groups(config)
    if found or groups is None:
        return found
    if count % groups[0]:
        found.append(f"n_group={groups[0]} does not divide n_routed_experts={count}")
    elif topk > groups[1] * (count // groups[0]):
        found.append(
            f"num_experts_per_tok={topk} is more than the {groups[1] * (count // groups[0])} "
            f"experts of topk_group={groups[1]} groups"
        )
    return found


def _v3_problems(config: HfConfig) -> list[str]:
    found = _problems({**_V3, **config})
    if config.get("num_experts_per_tok") == 1:
        found.append(
            "num_experts_per_tok=1 is not supported: transformers sets the weight to 1, "
            "megatron-core's topk_routing_with_score_function leaves the sigmoid"
        )
    return found


_ROWS = (
    dense.EMBEDDING,
    *latent.ATTENTION,
    *moe.DENSE_MLP,
    moe.EXPERTS_NORM,
    moe.router("mlp.gate"),
    *moe.EXPERTS,
    *moe.shared("mlp.shared_experts"),
)
_BIAS = Row(
    f"{moe.DECODER}mlp.router.expert_bias",
    "routed",
    (Part(f"{moe.LAYER}mlp.gate.e_score_correction_bias", "routed"),),
    layers="moe",
    dtype="float32",
)
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1, None),
    "moe_layer_freq": (1,),
}
_HARMLESS = (
    dense.HARMLESS
    | latent.HARMLESS
    | moe.HARMLESS
    # Of training losses, of where experts ran, and of layers that are not part of the model.
    | {"aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers"}
)
# The layer after the last predicts one token further; transformers passes it over too.
_IGNORED = (*dense.IGNORED, "model.layers.{layers}.*")

ARCHITECTURES = (
    Architecture(
        name="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        rows=(*_ROWS, *dense.OUTPUT),
        transformer=_transformer,
        required=_REQUIRED
        | {
            # transformers' own class never normalises the weights, whatever the file says.
            "norm_topk_prob": (False,),
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
        },
        defaults=_V2,
        harmless=_HARMLESS,
        ignored=_IGNORED,
        extra_sizes=_sizes,
        is_moe=is_moe,
        # A group ranks by its best expert. The norms of the latents have transformers' default.
        features=lambda _config: {"router_group_experts": 1, "latent_norm_eps": 1e-6},
        refusals=lambda config: _problems({**_V2, **config}),
        models="DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-Coder-V2",
    ),
    Architecture(
        name="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        rows=(*_ROWS, _BIAS, *dense.OUTPUT),
        transformer=_v3_transformer,
        required=_REQUIRED
        | {
            # megatron-core's topk_routing_with_score_function always normalises sigmoids.
            "norm_topk_prob": (True,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            # megatron-core's _apply_rotary_pos_emb_bshd takes MLA's pairs as interleaved.
            "rope_interleave": (True,),
        },
        defaults=_V3,
        harmless=_HARMLESS,
        ignored=_IGNORED,
        extra_sizes=_sizes,
        is_moe=is_moe,
        # A group ranks by the sum of its two best experts.
        features=lambda _config: {"router_group_experts": 2, "latent_norm_eps": 1e-6},
        refusals=_v3_problems,
        models="DeepSeek-V3, DeepSeek-R1, Kimi-K2, Moonlight",
    ),
)
