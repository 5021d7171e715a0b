"""Phi-3 and Phi-4: Llama whose projections of one input lie in one tensor."""

from typing import Any

from megatron_bridge.models import dense, rotary, windows
from megatron_bridge.registry import Architecture, HfConfig, Part, Row, head_dim

_DEFAULTS = dense.DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "sliding_window": None,
}
_REQUIRED = dense.REQUIRED | {
    "resid_pdrop": (0.0,),
    "embd_pdrop": (0.0,),
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
}
_QKV = "model.layers.{layer}.self_attn.qkv_proj.weight"


def _transformer(config: HfConfig) -> dict[str, Any]:
    return dense.transformer(config) | windows.transformer(config["sliding_window"], None)


def _rotary(config: HfConfig) -> rotary.Parameters:
    """Older configs call longrope "su" or "yarn"."""
    field = next((f for f in ("rope_scaling", "rope_parameters") if config.get(f)), None)
    if field is None:
        return rotary.parameters(config)
    given = {"rope_type": config[field].get("type"), **config[field]}
    given.pop("type", None)
    if given["rope_type"] in ("su", "yarn"):
        given["rope_type"] = "longrope"
    return rotary.parameters({**config, field: given})


def _refusals(config: HfConfig) -> list[str]:
    config = {**_DEFAULTS, **config}
    made = _rotary(config)
    found = rotary.problems(made, head_dim(config), partial=True)
    found += windows.size_problems(config["sliding_window"])
    if made["rope_type"] not in ("default", "longrope", "dynamic"):
        found.append(f"rope_type '{made['rope_type']}' is not supported for Phi-3")
    return found


ARCHITECTURES = (
    Architecture(
        name="Phi3ForCausalLM",
        model_type="phi3",
        rows=(
            dense.EMBEDDING,
            dense.INPUT_NORM,
            Row(
                dense.QKV.megatron,
                dense.QKV.shape,
                tuple(Part(_QKV, part.axes) for part in dense.QKV.parts),
                cut="group",
            ),
            dense.ATTENTION_OUTPUT,
            dense.MLP_NORM,
            dense.FUSED_FC1,
            dense.FC2,
            *dense.OUTPUT,
        ),
        transformer=_transformer,
        required=_REQUIRED,
        defaults=_DEFAULTS,
        harmless=dense.HARMLESS,
        ignored=dense.IGNORED,
        features=lambda config: {"rotary": _rotary(config)},
        refusals=_refusals,
        models="Phi-3 mini and medium, Phi-4, Phi-4-mini",
    ),
)
