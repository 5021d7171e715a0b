"""GLM-4, dense: neighbouring components rotated in half of each head; from 0414 on post norms."""

from dataclasses import replace
from typing import Any

from megatron_bridge.models import dense, rotary
from megatron_bridge.registry import Architecture, HfConfig, Row, head_dim

_DEFAULTS = dense.DEFAULTS | {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "attention_bias": True,
}
_REQUIRED = {field: v for field, v in dense.REQUIRED.items() if field != "attention_bias"} | {
    "attention_bias": (True, False)
}


def _transformer(config: HfConfig) -> dict[str, Any]:
    return {
        **dense.transformer(config),
        "add_qkv_bias": config["attention_bias"],
        "rotary_interleaved": True,
    }


def _rotary(config: HfConfig) -> rotary.Parameters:
    return rotary.parameters(config, partial=0.5)


def _refusals(config: HfConfig) -> list[str]:
    config = {**_DEFAULTS, **config}
    return rotary.problems(_rotary(config), head_dim(config), partial=True)


def _table(name: str, model_type: str, post_norms: tuple[Row, ...], models: str) -> Architecture:
    """The architecture, with the norms that follow attention and MLP or without any."""
    return Architecture(
        name=name,
        model_type=model_type,
        rows=(
            dense.EMBEDDING,
            dense.INPUT_NORM,
            dense.QKV,
            replace(dense.QKV_BIAS, when=_has_bias),
            dense.ATTENTION_OUTPUT,
            dense.MLP_NORM,
            dense.FUSED_FC1,
            dense.FC2,
            *post_norms,
            *dense.OUTPUT,
        ),
        transformer=_transformer,
        required=_REQUIRED,
        defaults=_DEFAULTS,
        harmless=dense.HARMLESS,
        ignored=dense.IGNORED,
        features=lambda config: {"rotary": _rotary(config), "post_norms": bool(post_norms)},
        refusals=_refusals,
        models=models,
    )


def _has_bias(config: HfConfig) -> bool:
    return bool(config.get("attention_bias", True))


ARCHITECTURES = (
    _table("GlmForCausalLM", "glm", (), "GLM-4-9B (hf)"),
    _table(
        "Glm4ForCausalLM",
        "glm4",
        (
            dense.norm(
                "post_self_attn_layernorm", "self_attention.linear_proj.post_layernorm.weight"
            ),
            dense.norm("post_mlp_layernorm", "mlp.linear_fc2.post_layernorm.weight"),
        ),
        "GLM-4-0414 9B and 32B",
    ),
)
