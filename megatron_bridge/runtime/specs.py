"""Which modules a layer is made of: transformer-engine's on a GPU that has it, else our own."""

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_bridge.runtime import device
from megatron_bridge.runtime.attention import CoreAttention
from megatron_bridge.runtime.norm import RMSNorm


def layer_spec(config: TransformerConfig) -> Any:
    """The spec of this pipeline stage's layers."""
    if device.have_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    return _local_spec(config)


def _local_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's parallel linear layers around our packed attention and norm."""
    layer: Any = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    norm: Any = RMSNorm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    layers = get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)
