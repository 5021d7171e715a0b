"""Multi-head latent attention (MLA): rows, arguments, rotary embeddings."""

from typing import Any

from megatron_bridge.models import dense, rotary
from megatron_bridge.registry import HfConfig, Part, Row

_LAYER = "model.layers.{layer}.self_attn."
_DECODER = "decoder.layers.{layer}.self_attention."
# The rotary settings of MLATransformerConfig, as transformers' ``rope_parameters`` call them.
_YARN = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0}


def _compresses_queries(config: HfConfig) -> bool:
    return config["q_lora_rank"] is not None


def _whole_queries(config: HfConfig) -> bool:
    return config["q_lora_rank"] is None


def _row(megatron: str, shape: str, name: str, **options: Any) -> Row:
    return Row(f"{_DECODER}{megatron}", shape, (Part(f"{_LAYER}{name}", shape),), **options)


ATTENTION = (
    # Nothing is fused with this norm: both projections of the input come after it.
    dense.norm("input_layernorm", "input_layernorm.weight"),
    _row(
        "linear_q_proj.weight",
        "head query_dim, hidden",
        "q_proj.weight",
        cut="head",
        when=_whole_queries,
    ),
    _row(
        "linear_q_down_proj.weight",
        "query_rank, hidden",
        "q_a_proj.weight",
        when=_compresses_queries,
    ),
    _row(
        "q_layernorm.weight",
        "query_rank",
        "q_a_layernorm.weight",
        fused=f"{_DECODER}linear_q_up_proj.layer_norm_weight",
        when=_compresses_queries,
    ),
    _row(
        "linear_q_up_proj.weight",
        "head query_dim, query_rank",
        "q_b_proj.weight",
        cut="head",
        when=_compresses_queries,
    ),
    _row("linear_kv_down_proj.weight", "latent, hidden", "kv_a_proj_with_mqa.weight"),
    _row(
        "kv_layernorm.weight",
        "key_rank",
        "kv_a_layernorm.weight",
        fused=f"{_DECODER}linear_kv_up_proj.layer_norm_weight",
    ),
    _row(
        "linear_kv_up_proj.weight", "head key_value_dim, key_rank", "kv_b_proj.weight", cut="head"
    ),
    _row("linear_proj.weight", "hidden, head value_dim", "o_proj.weight", cut="head"),
)

DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# Follow from the others, or are not read.
HARMLESS = frozenset({"head_dim", "qk_head_dim"})


def sizes(config: HfConfig) -> dict[str, int]:
    """Sizes of the axes that the rows name."""
    plain, turned = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    return {
        "query_dim": plain + turned,
        "query_rank": config["q_lora_rank"] or 0,
        "key_rank": config["kv_lora_rank"],
        "latent": config["kv_lora_rank"] + turned,
        "key_value_dim": plain + config["v_head_dim"],
        "value_dim": config["v_head_dim"],
    }


def transformer(config: HfConfig) -> dict[str, Any]:
    """Arguments of MLATransformerConfig besides those of every dense model."""
    heads = config["num_attention_heads"]
    return {
        "multi_latent_attention": True,
        "num_query_groups": heads,
        "kv_channels": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "qk_layernorm": True,
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        **_rotary(rotary.parameters(config)),
    }


def _rotary(made: rotary.Parameters) -> dict[str, Any]:
    arguments = {"rotary_base": made["rope_theta"]}
    if made["rope_type"] == "default":
        # MLA scales its softmax by this factor whatever the kind of rotary embedding.
        return arguments | {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    yarn = {key: made.get(key) or absent for key, absent in _YARN.items()}
    if not (made.get("mscale") and made.get("mscale_all_dim")):
        # transformers then takes 0.1 ln(factor) + 1 for cosines and sines.
        yarn |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    return (
        arguments
        | yarn
        | {
            "rope_type": "yarn",
            "rotary_scaling_factor": made["factor"],
            "original_max_position_embeddings": made["original_max_position_embeddings"],
        }
    )


def problems(config: HfConfig) -> list[str]:
    """Why Megatron cannot compute this attention; empty when it can."""
    made = rotary.parameters(config)
    kind = made["rope_type"]
    found = rotary.problems(made, config["qk_rope_head_dim"])
    if kind not in ("default", "yarn"):
        found.append(
            f"rope_type '{kind}' is not supported with MLA: megatron-core's "
            "MLATransformerConfig.rope_type knows 'rope' and 'yarn'"
        )
    if kind == "yarn":
        found += _yarn_problems(made)
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if groups not in (None, heads):
        found.append(
            f"num_key_value_heads={groups} is not supported with MLA, where each of the "
            f"num_attention_heads={heads} has its own keys"
        )
    return found


def _yarn_problems(made: rotary.Parameters) -> list[str]:
    found = []
    if made.get("attention_factor") is not None:
        found.append(
            "attention_factor is not supported with MLA: megatron-core's MultiLatentAttention "
            "takes mscale and mscale_all_dim alone"
        )
    if not made.get("truncate", True):
        found.append(
            "truncate=false is not supported with MLA: megatron-core's MultiLatentAttention does "
            "not pass correction_range_round_to_int on"
        )
    if made.get("mscale_all_dim") and not made.get("mscale"):
        found.append("mscale_all_dim without mscale is not supported; give both or neither")
    return found
