"""Gemma 3, text: norms before and after, windows in most layers, each kind with its rotary base."""

import math
from typing import Any

from megatron_bridge.models import dense, rotary, windows
from megatron_bridge.registry import Architecture, HfConfig

_DEFAULTS = dense.DEFAULTS | {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "layer_types": None,
    "rope_local_base_freq": None,
}
_GLOBAL, _LOCAL = "full_attention", windows.SLIDING
_REQUIRED = {field: v for field, v in dense.REQUIRED.items() if field != "hidden_act"} | {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (False,),
}


def _kinds(config: HfConfig) -> list[str]:
    """What each layer sees: every sixth all, where the config says nothing else."""
    if config["layer_types"] is not None:
        return list(config["layer_types"])
    every, layers = config["sliding_window_pattern"], config["num_hidden_layers"]
    return [_LOCAL if (layer + 1) % every else _GLOBAL for layer in range(layers)]


def _transformer(config: HfConfig) -> dict[str, Any]:
    return {
        **dense.transformer(config),
        **windows.transformer(config["sliding_window"], _kinds(config)),
        "activation": "gelu_tanh",
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
    }


def _rotary(config: HfConfig, kind: str) -> rotary.Parameters:
    """Of layers of one kind, from either form of config.json."""
    of_kinds = config["rope_parameters"] or {}
    given = dict(of_kinds.get(kind) or {})
    if kind == _GLOBAL:
        given |= config["rope_scaling"] or {}
        theta, field = 1_000_000.0, "rope_theta"
    else:
        theta, field = 10_000.0, "rope_local_base_freq"
    if config[field] is not None:
        theta = config[field]
    share = config["partial_rotary_factor"]
    base = {"rope_theta": theta} | ({} if share is None else {"partial_rotary_factor": share})
    return rotary.complete(base | given, config)


def _features(config: HfConfig) -> dict[str, Any]:
    return {
        "post_norms": True,
        "embedding_scale": math.sqrt(config["hidden_size"]),
        "rotary": _rotary(config, _GLOBAL),
        "local_rotary": _rotary(config, _LOCAL),
    }


def _refusals(config: HfConfig) -> list[str]:
    config = {**_DEFAULTS, "num_hidden_layers": 0, **config}
    found = windows.problems(config, config["sliding_window"], _kinds(config))
    other = sorted({*(config["rope_parameters"] or {})} - {_GLOBAL, _LOCAL})
    if other:
        return [*found, f"rope_parameters {other} are not supported; it has {_GLOBAL}, {_LOCAL}"]
    if "type" in (config["rope_scaling"] or {}):
        found.append("rope_scaling.type is read by some versions of transformers; say rope_type")
    both = {kind: _rotary(config, kind) for kind in (_GLOBAL, _LOCAL)}
    for kind, made in both.items():
        found += [f"{kind}: {problem}" for problem in rotary.problems(made, config["head_dim"])]
        if made["rope_type"] not in ("default", "linear", "llama3"):
            found.append(f"{kind}: rope_type '{made['rope_type']}' is not supported for Gemma 3")
    return found


ARCHITECTURES = (
    Architecture(
        name="Gemma3ForCausalLM",
        model_type="gemma3_text",
        rows=(
            dense.EMBEDDING,
            dense.INPUT_NORM,
            dense.QKV,
            *dense.QK_NORM,
            dense.ATTENTION_OUTPUT,
            dense.norm(
                "post_attention_layernorm", "self_attention.linear_proj.post_layernorm.weight"
            ),
            dense.norm(
                "pre_feedforward_layernorm",
                "pre_mlp_layernorm.weight",
                "mlp.linear_fc1.layer_norm_weight",
            ),
            dense.GATED_FC1,
            dense.FC2,
            dense.norm("post_feedforward_layernorm", "mlp.linear_fc2.post_layernorm.weight"),
            *dense.OUTPUT,
        ),
        transformer=_transformer,
        required=_REQUIRED,
        defaults=_DEFAULTS,
        harmless=dense.HARMLESS | {"cache_implementation"},
        ignored=dense.IGNORED,
        features=_features,
        refusals=_refusals,
        aliases=("Gemma3TextForCausalLM",),
        classifier="Gemma3TextForSequenceClassification",
        models="Gemma 3 1B and text models of its class",
    ),
)
