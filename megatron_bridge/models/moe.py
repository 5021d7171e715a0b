"""What models with experts share: rows, arguments, and fields of config.json."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_bridge.models import dense
from megatron_bridge.registry import HfConfig, Part, Row

LAYER = "model.layers.{layer}."
DECODER = "decoder.layers.{layer}."

# Layers without experts have the norm before the MLP fused into it in transformer-engine's layers,
# those with experts never.
DENSE_MLP = tuple(replace(row, layers="dense") for row in dense.GATED_MLP)
EXPERTS_NORM = dense.norm("post_attention_layernorm", "pre_mlp_layernorm.weight", layers="moe")


def router(name: str) -> Row:
    """The router's weight, from the HuggingFace module of this name."""
    return Row(
        f"{DECODER}mlp.router.weight",
        "routed, hidden",
        (Part(f"{LAYER}{name}.weight", "routed, hidden"),),
        layers="moe",
    )


def experts(module: str, gate: str, up: str, down: str, width: str = "moe_ffn") -> tuple[Row, ...]:
    """Every expert's MLP, from the HuggingFace module that holds them under their numbers."""
    inside = f"{DECODER}mlp.experts."
    one = f"{LAYER}{module}.{{expert}}."
    return (
        Row(
            f"{inside}local_experts.{{expert}}.linear_fc1.weight",
            f"+ {width}, hidden",
            (
                Part(f"{one}{gate}.weight", f"{width}, hidden"),
                Part(f"{one}{up}.weight", f"{width}, hidden"),
            ),
            cut=width,
            fused=f"{inside}linear_fc1.weight{{expert}}",
            key=f"{inside}experts.linear_fc1.weight",
            layers="moe",
        ),
        Row(
            f"{inside}local_experts.{{expert}}.linear_fc2.weight",
            f"hidden, {width}",
            (Part(f"{one}{down}.weight", f"hidden, {width}"),),
            cut=width,
            fused=f"{inside}linear_fc2.weight{{expert}}",
            key=f"{inside}experts.linear_fc2.weight",
            layers="moe",
        ),
    )


EXPERTS = experts("mlp.experts", "gate_proj", "up_proj", "down_proj")


def shared(module: str) -> tuple[Row, ...]:
    """The MLP that every token passes beside its experts, from the HuggingFace module."""
    inside = f"{DECODER}mlp.shared_experts."
    return (
        Row(
            f"{inside}linear_fc1.weight",
            "+ shared_ffn, hidden",
            (
                Part(f"{LAYER}{module}.gate_proj.weight", "shared_ffn, hidden"),
                Part(f"{LAYER}{module}.up_proj.weight", "shared_ffn, hidden"),
            ),
            cut="shared_ffn",
            layers="moe",
        ),
        Row(
            f"{inside}linear_fc2.weight",
            "hidden, shared_ffn",
            (Part(f"{LAYER}{module}.down_proj.weight", "hidden, shared_ffn"),),
            cut="shared_ffn",
            layers="moe",
        ),
    )


# Training losses of transformers that add to no logit; the recipe decides over losses here.
HARMLESS = frozenset({"router_aux_loss_coef", "output_router_logits"})


def layer_frequency(config: HfConfig, is_moe: Callable[[HfConfig, int], bool]) -> int | list[int]:
    """Megatron's ``moe_layer_freq``: 1 where every layer has experts, else a number per layer."""
    kinds = [int(is_moe(config, layer)) for layer in range(config["num_hidden_layers"])]
    return 1 if all(kinds) else kinds


def transformer(
    config: HfConfig,
    *,
    count: int,
    width: int,
    is_moe: Callable[[HfConfig, int], bool],
    normalized: bool,
) -> dict[str, Any]:
    """TransformerConfig's arguments of a model whose router is a softmax.

    Args:
        count: number of experts.
        width: of each expert's MLP.
        normalized: whether the weights of a token's experts sum to one.
    """
    return {
        **dense.transformer(config),
        "num_moe_experts": count,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": layer_frequency(config, is_moe),
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_pre_softmax": not normalized,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }


def topk_problems(config: HfConfig, count: int | None, *, normalized: bool) -> list[str]:
    """Why Megatron cannot choose so many of these experts; empty when it can."""
    topk = config.get("num_experts_per_tok")
    if count is None or topk is None:
        return ["config.json lacks the number of experts or num_experts_per_tok"]
    if not 1 <= topk <= count:
        return [f"num_experts_per_tok={topk} must be from 1 to the number of experts, {count}"]
    if topk == 1 and normalized:
        return [
            "num_experts_per_tok=1 with normalised weights (each is 1) is not supported: "
            "megatron-core's topk_routing_with_score_function has no such weight, and the router "
            "would have no gradient"
        ]
    return []
