"""Which modules a layer is made of: transformer-engine's on a GPU that has it, else our own."""

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_bridge.runtime import cpu_experts, dense_variants, device
from megatron_bridge.runtime.attention import CoreAttention
from megatron_bridge.runtime.mla import LatentAttention, ReplicatedLinear
from megatron_bridge.runtime.moe import MoELayer, Router
from megatron_bridge.runtime.norm import RMSNorm

# In a distributed checkpoint norms have the names of transformer-engine's fused layers.
_INPUT_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


def layer_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The specs of this pipeline stage's layers, or of one of its model chunks.

    Args:
        config: of the whole model; ``config.bridge`` says what it cannot (see ``features``).
        vp_stage: the model chunk, where a stage holds several.
    """
    if device.have_transformer_engine():
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        for layer in {id(layer): layer for layer in block.layer_specs or ()}.values():
            _adopt(layer, config)
        return block
    cpu_experts.install_without_engine()
    start = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    kinds = {moe: _local_layer(config, moe=moe) for moe in {*moe_layers(config)}}
    specs = [kinds[moe] for moe in moe_layers(config)[start : start + count]]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)  # type: ignore[arg-type]


def moe_layers(config: TransformerConfig) -> list[bool]:
    """Of every layer of the model, whether it has experts."""
    every = config.moe_layer_freq
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    if isinstance(every, int):
        return [layer % every == 0 for layer in range(config.num_layers)]
    assert len(every) == config.num_layers, (every, config.num_layers)
    return [bool(one) for one in every]


def _local_layer(config: TransformerConfig, *, moe: bool) -> ModuleSpec:
    """Megatron's parallel linear layers around our packed attention, norms and experts."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = CoreAttention
    keys = {} if moe else dict(_MLP_NORM)
    if config.multi_latent_attention:
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        keys |= _LATENT_NORMS
    else:
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        keys |= _INPUT_NORM
    parts.sharded_state_dict_keys_map = keys
    _adopt(layer, config)
    return layer


def _adopt(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Put our experts, router and latent attention in the places of Megatron's."""
    parts: Any = layer.submodules
    if hasattr(parts.self_attention.submodules, "linear_kv_down_proj"):
        parts.self_attention.module = LatentAttention
    if hasattr(parts.mlp.submodules, "router"):
        parts.mlp.module = MoELayer
        parts.mlp.submodules.router = Router
    dense_variants.apply(layer, config)
