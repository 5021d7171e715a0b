"""GPT-OSS: sinks, every other layer with a window, experts with biases and a clamped SwiGLU."""

from typing import Any

from megatron_bridge.models import dense, moe, rotary, windows
from megatron_bridge.registry import Architecture, HfConfig, Part, Row, head_dim

_THETA = 150000.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS = dense.DEFAULTS | {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "experts_per_token": None,
    "sliding_window": 128,
    "layer_types": None,
    "swiglu_limit": 7.0,
}
_REQUIRED = {field: v for field, v in dense.REQUIRED.items() if field != "attention_bias"} | {
    "attention_bias": (True,),
    # Megatron's quick_gelu has this factor fixed.
    "swiglu_alpha": (1.702,),
}


def _always(_config: HfConfig, _layer: int) -> bool:
    return True


def _bias(megatron: str, axes: str, huggingface: str, cut: str | None = None) -> Row:
    return Row(
        f"{moe.DECODER}{megatron}", axes, (Part(f"{moe.LAYER}{huggingface}", axes),), cut=cut
    )


def _experts(kind: str, axes: str, huggingface: str, part: str, cut: str | None = "ffn") -> Row:
    """A tensor of each expert, from the one that holds those of all experts."""
    inside, (linear, name) = f"{moe.DECODER}mlp.experts.", kind.split(".")
    return Row(
        f"{inside}local_experts.{{expert}}.{kind}",
        axes,
        (Part(f"{moe.LAYER}mlp.experts.{huggingface}", f"expert, {part}"),),
        cut=cut,
        fused=f"{inside}{linear}.{name}{{expert}}",
        key=f"{inside}experts.{kind}",
        layers="moe",
    )


def _kinds(config: HfConfig) -> list[str]:
    if config["layer_types"] is not None:
        return list(config["layer_types"])
    both = (windows.SLIDING, "full_attention")
    return [both[layer % 2] for layer in range(config["num_hidden_layers"])]


def _transformer(config: HfConfig) -> dict[str, Any]:
    return {
        **moe.transformer(
            config,
            count=config["num_local_experts"],
            width=config["intermediate_size"],
            is_moe=_always,
            normalized=True,
        ),
        **windows.transformer(config["sliding_window"], _kinds(config)),
        # transformer-engine's grouped experts refuse it beside biases.
        "bias_dropout_fusion": False,
        "softmax_type": "learnable",
        "activation": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config["swiglu_limit"],
    }


def _rotary(config: HfConfig) -> rotary.Parameters:
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = config | {"rope_parameters": _YARN}
    return rotary.parameters(config, theta=_THETA)


def _refusals(config: HfConfig) -> list[str]:
    config = {**_DEFAULTS, "num_hidden_layers": 0, **config}
    found = rotary.problems(_rotary(config), head_dim(config))
    found += windows.problems(config, config["sliding_window"], _kinds(config))
    found += moe.topk_problems(config, config["num_local_experts"], normalized=True)
    other = config["experts_per_token"]
    if other not in (None, config["num_experts_per_tok"]):
        found.append(
            f"experts_per_token={other} and num_experts_per_tok={config['num_experts_per_tok']} "
            "differ; transformers reads the second"
        )
    return found


ARCHITECTURES = (
    Architecture(
        name="GptOssForCausalLM",
        model_type="gpt_oss",
        rows=(
            dense.EMBEDDING,
            dense.INPUT_NORM,
            dense.QKV,
            dense.QKV_BIAS,
            _bias(
                "self_attention.core_attention.softmax_offset", "head", "self_attn.sinks", "head"
            ),
            dense.ATTENTION_OUTPUT,
            _bias("self_attention.linear_proj.bias", "hidden", "self_attn.o_proj.bias"),
            moe.EXPERTS_NORM,
            moe.router("mlp.router"),
            _bias("mlp.router.bias", "routed", "mlp.router.bias"),
            _experts("linear_fc1.weight", "pair ffn, hidden", "gate_up_proj", "hidden, ffn pair"),
            _experts("linear_fc1.bias", "pair ffn", "gate_up_proj_bias", "ffn pair"),
            _experts("linear_fc2.weight", "hidden, ffn", "down_proj", "ffn, hidden"),
            _experts("linear_fc2.bias", "hidden", "down_proj_bias", "hidden", cut=None),
            *dense.OUTPUT,
        ),
        transformer=_transformer,
        required=_REQUIRED,
        defaults=_DEFAULTS,
        harmless=dense.HARMLESS | moe.HARMLESS | {"initial_context_length"},
        ignored=dense.IGNORED,
        extra_sizes=lambda config: {
            "expert": config["num_local_experts"],
            "routed": config["num_local_experts"],
            "pair": 2,
        },
        is_moe=_always,
        features=lambda config: {"rotary": _rotary(config), "linear_biases": True},
        refusals=_refusals,
        models="gpt-oss-20b, gpt-oss-120b",
    ),
)
