"""What the dense decoder models share: rows, fields of config.json, rotary embeddings."""

from typing import Any

from megatron_bridge.registry import HfConfig, Kind, Row, head_dim, kv_heads, tied

_LAYER = "model.layers.{}."
_DECODER = "decoder.layers.{}."


def _projection(name: str, rows: str, columns: str) -> dict[str, tuple[str, ...]]:
    return {f"{_LAYER}{name}.weight": (rows, columns)}


EMBEDDING = (
    Row(
        {"model.embed_tokens.weight": ("vocab", "hidden")},
        ("embedding.word_embeddings.weight",),
        Kind.VOCABULARY,
        cut=0,
    ),
)
INPUT_NORM = Row(
    {f"{_LAYER}input_layernorm.weight": ("hidden",)},
    (
        f"{_DECODER}input_layernorm.weight",
        f"{_DECODER}self_attention.linear_qkv.layer_norm_weight",
    ),
)
QKV = Row(
    _projection("self_attn.q_proj", "q", "hidden")
    | _projection("self_attn.k_proj", "kv", "hidden")
    | _projection("self_attn.v_proj", "kv", "hidden"),
    (f"{_DECODER}self_attention.linear_qkv.weight",),
    Kind.QKV,
    cut=0,
)
QKV_BIAS = Row(
    {
        f"{_LAYER}self_attn.q_proj.bias": ("q",),
        f"{_LAYER}self_attn.k_proj.bias": ("kv",),
        f"{_LAYER}self_attn.v_proj.bias": ("kv",),
    },
    (f"{_DECODER}self_attention.linear_qkv.bias",),
    Kind.QKV,
    cut=0,
)
QK_NORM = (
    Row(
        {f"{_LAYER}self_attn.q_norm.weight": ("head_dim",)},
        (f"{_DECODER}self_attention.q_layernorm.weight",),
    ),
    Row(
        {f"{_LAYER}self_attn.k_norm.weight": ("head_dim",)},
        (f"{_DECODER}self_attention.k_layernorm.weight",),
    ),
)
ATTENTION_OUTPUT = Row(
    _projection("self_attn.o_proj", "hidden", "q"),
    (f"{_DECODER}self_attention.linear_proj.weight",),
    cut=1,
)
GATED_MLP = (
    Row(
        {f"{_LAYER}post_attention_layernorm.weight": ("hidden",)},
        (
            f"{_DECODER}pre_mlp_layernorm.weight",
            f"{_DECODER}mlp.linear_fc1.layer_norm_weight",
        ),
    ),
    Row(
        _projection("mlp.gate_proj", "ffn", "hidden") | _projection("mlp.up_proj", "ffn", "hidden"),
        (f"{_DECODER}mlp.linear_fc1.weight",),
        Kind.GATED,
        cut=0,
    ),
    Row(
        _projection("mlp.down_proj", "hidden", "ffn"),
        (f"{_DECODER}mlp.linear_fc2.weight",),
        cut=1,
    ),
)
OUTPUT = (
    Row({"model.norm.weight": ("hidden",)}, ("decoder.final_layernorm.weight",)),
    Row(
        {"lm_head.weight": ("vocab", "hidden")},
        ("output_layer.weight",),
        Kind.VOCABULARY,
        cut=0,
        only="untied",
    ),
)
IGNORED = (f"{_LAYER}self_attn.rotary_emb.inv_freq",)

REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_bias": (False,),
    "pretraining_tp": (1,),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
}
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "head_dim": None,
    "num_key_value_heads": None,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}
HARMLESS = frozenset(
    {
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "use_cache",
        "initializer_range",
        "return_dict",
        "id2label",
        "label2id",
        "is_llama_config",
        # Without use_sliding_window these two say nothing.
        "sliding_window",
        "max_window_layers",
    }
)


def transformer(config: HfConfig) -> dict[str, Any]:
    """Arguments of Megatron's TransformerConfig that every dense model has."""
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": kv_heads(config),
        "kv_channels": head_dim(config),
        "layernorm_epsilon": config.get("rms_norm_eps", DEFAULTS["rms_norm_eps"]),
        "init_method_std": config.get("initializer_range", 0.02),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def gpt(config: HfConfig) -> dict[str, Any]:
    """Arguments of Megatron's GPTModel besides its config, spec and vocabulary."""
    return {
        "max_sequence_length": config.get(
            "max_position_embeddings", DEFAULTS["max_position_embeddings"]
        ),
        "share_embeddings_and_output_weights": tied(config),
        "position_embedding_type": "rope",
        **rotary(config),
    }


def rotary_parameters(config: HfConfig) -> dict[str, Any]:
    """Rotary settings in transformers 5's form, from either form of config.json."""
    parameters = dict(config.get("rope_parameters") or {})
    if not parameters:
        parameters = dict(config.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", config.get("rope_theta", DEFAULTS["rope_theta"]))
    parameters["rope_type"] = parameters.get("rope_type") or parameters.pop("type", "default")
    return parameters


# Megatron's rope scaling is Llama 3's, with these three fixed in its code.
_LLAMA3_FIXED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rotary_problems(config: HfConfig) -> list[str]:
    """Why Megatron cannot compute these rotary embeddings; empty when it can."""
    parameters = rotary_parameters(config)
    kind = parameters["rope_type"]
    if kind not in ("default", "llama3"):
        return [f"rope_type '{kind}' is not supported; supported: default, llama3"]
    problems = []
    if float(parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append("partial_rotary_factor other than 1 is not supported")
    if kind == "llama3":
        problems += [
            f"rope scaling llama3 with {name}={parameters.get(name)} is not supported; Megatron "
            f"computes it with {value}"
            for name, value in _LLAMA3_FIXED.items()
            if parameters.get(name) != value
        ]
        if "factor" not in parameters:
            problems.append("rope scaling llama3 needs a factor")
    return problems


def rotary(config: HfConfig) -> dict[str, Any]:
    """GPTModel's rotary arguments."""
    parameters = rotary_parameters(config)
    arguments: dict[str, Any] = {"rotary_base": parameters["rope_theta"]}
    if parameters["rope_type"] == "llama3":
        arguments |= {"rope_scaling": True, "rope_scaling_factor": parameters["factor"]}
    return arguments
