"""What the dense decoder models share: rows, fields of config.json, rotary embeddings."""

from collections.abc import Callable
from typing import Any

from megatron_bridge.models import rotary
from megatron_bridge.registry import (
    HfConfig,
    Part,
    Row,
    has_score_bias,
    has_value_head,
    head_dim,
    kv_heads,
    tied,
    untied,
)

_LAYER = "model.layers.{layer}."
_DECODER = "decoder.layers.{layer}."


def weight(name: str, axes: str) -> Part:
    """The weight of a layer's HuggingFace module."""
    return Part(f"{_LAYER}{name}.weight", axes)


def norm(huggingface: str, megatron: str, fused: str | None = None, **options: Any) -> Row:
    """A norm over the hidden dimension in each layer."""
    return Row(
        f"{_DECODER}{megatron}",
        "hidden",
        (weight(huggingface, "hidden"),),
        fused=fused and f"{_DECODER}{fused}",
        **options,
    )


EMBEDDING = Row(
    "embedding.word_embeddings.weight",
    "vocab, hidden",
    (Part("model.embed_tokens.weight", "vocab, hidden"),),
    cut="vocab",
)
INPUT_NORM = norm(
    "input_layernorm",
    "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight",
)
QKV = Row(
    f"{_DECODER}self_attention.linear_qkv.weight",
    "group + head_dim, hidden",
    (
        weight("self_attn.q_proj", "group query head_dim, hidden"),
        weight("self_attn.k_proj", "group head_dim, hidden"),
        weight("self_attn.v_proj", "group head_dim, hidden"),
    ),
    cut="group",
)
QKV_BIAS = Row(
    f"{_DECODER}self_attention.linear_qkv.bias",
    "group + head_dim",
    (
        Part(f"{_LAYER}self_attn.q_proj.bias", "group query head_dim"),
        Part(f"{_LAYER}self_attn.k_proj.bias", "group head_dim"),
        Part(f"{_LAYER}self_attn.v_proj.bias", "group head_dim"),
    ),
    cut="group",
)
QK_NORM = (
    Row(
        f"{_DECODER}self_attention.q_layernorm.weight",
        "head_dim",
        (weight("self_attn.q_norm", "head_dim"),),
    ),
    Row(
        f"{_DECODER}self_attention.k_layernorm.weight",
        "head_dim",
        (weight("self_attn.k_norm", "head_dim"),),
    ),
)
ATTENTION_OUTPUT = Row(
    f"{_DECODER}self_attention.linear_proj.weight",
    "hidden, head head_dim",
    (weight("self_attn.o_proj", "hidden, head head_dim"),),
    cut="head",
)
MLP_NORM = norm(
    "post_attention_layernorm",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight",
)
GATED_FC1 = Row(
    f"{_DECODER}mlp.linear_fc1.weight",
    "+ ffn, hidden",
    (weight("mlp.gate_proj", "ffn, hidden"), weight("mlp.up_proj", "ffn, hidden")),
    cut="ffn",
)
FC2 = Row(
    f"{_DECODER}mlp.linear_fc2.weight",
    "hidden, ffn",
    (weight("mlp.down_proj", "hidden, ffn"),),
    cut="ffn",
)
FUSED_FC1 = Row(
    GATED_FC1.megatron,
    GATED_FC1.shape,
    (weight("mlp.gate_up_proj", "ffn, hidden"), weight("mlp.gate_up_proj", "ffn, hidden")),
    cut="ffn",
)
GATED_MLP = (MLP_NORM, GATED_FC1, FC2)
FINAL_NORM = Row("decoder.final_layernorm.weight", "hidden", (Part("model.norm.weight", "hidden"),))
LM_HEAD = Row(
    "output_layer.weight",
    "vocab, hidden",
    (Part("lm_head.weight", "vocab, hidden"),),
    cut="vocab",
    when=untied,
)
VALUE_HEAD = Row(
    "output_layer.weight",
    "labels, hidden",
    (Part("score.weight", "labels, hidden"),),
    when=has_value_head,
)
VALUE_BIAS = Row(
    "output_layer.bias", "labels", (Part("score.bias", "labels"),), when=has_score_bias
)
OUTPUT = (FINAL_NORM, LM_HEAD, VALUE_HEAD, VALUE_BIAS)
LLAMA = (EMBEDDING, INPUT_NORM, QKV, ATTENTION_OUTPUT, *GATED_MLP, *OUTPUT)
IGNORED = (f"{_LAYER}self_attn.rotary_emb.inv_freq",)

REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_bias": (False,),
    "pretraining_tp": (1, None),
    "rope_interleaved": (False,),
}
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "head_dim": None,
    "num_key_value_heads": None,
    "tie_word_embeddings": False,
    **rotary.DEFAULTS,
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
        "num_labels",
        "problem_type",
        "classifier_dropout",
        "token_classification_bias",
        # For who scores texts with the model: whether the end token is read, too.
        "hybridflow_scored_at",
        "is_llama_config",
        # Which file of Python code has the model's class: transformers has its own.
        "auto_map",
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
    }


def features(config: HfConfig) -> dict[str, Any]:
    """What our layers need to know of every dense model: what it rotates by."""
    return {"rotary": rotary.parameters(config)}


def refusals(defaults: dict[str, Any]) -> Callable[[HfConfig], list[str]]:
    """Of an architecture with these defaults: why a config's rotary embeddings are refused."""

    def found(config: HfConfig) -> list[str]:
        made = {**defaults, **config}
        return rotary.problems(rotary.parameters(made), head_dim(made))

    return found
