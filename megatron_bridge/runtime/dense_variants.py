"""Layers of dense models that differ from Llama's: where norms sit, what each layer rotates by."""

from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_bridge.runtime import rotary_embedding
from megatron_bridge.runtime.expert_bias import with_output_bias
from megatron_bridge.runtime.features import features
from megatron_bridge.runtime.norm import RMSNorm, WideKeyNorm, WideQueryNorm
from megatron_bridge.runtime.rotary_choice import PerLayerRotaryAttention, PerLengthRotaryAttention


def apply(layer: ModuleSpec, config: Any) -> None:
    """Adjusts a layer's spec, ours or transformer-engine's, to ``config.bridge``."""
    wanted = features(config)
    if not wanted.input_norms:
        _without_input_norms(layer)
    if wanted.post_norms:
        _with_post_norms(layer)
    parts: Any = layer.submodules
    attention = parts.self_attention
    if wanted.wide_qk_norm:
        attention.submodules.q_layernorm = WideQueryNorm
        attention.submodules.k_layernorm = WideKeyNorm
    if wanted.local_rotary is not None:
        attention.module = PerLayerRotaryAttention
    elif wanted.rotary is not None and wanted.rotary["rope_type"] == "longrope":
        attention.module = PerLengthRotaryAttention
    experts = getattr(parts.mlp.submodules, "experts", None)
    if experts is not None and config.add_bias_linear:
        _with_expert_biases(experts, config)


def finish(model: Any, config: Any) -> None:
    """What a built GPTModel still needs: its rotary frequencies, the scale of its embedding."""
    rotary_embedding.install(model, config)
    scale = features(config).embedding_scale
    embedding = getattr(model, "embedding", None)
    if scale is not None and embedding is not None:
        embedding.register_forward_hook(_Scale(scale))


def _without_input_norms(layer: Any) -> None:
    submodules = layer.submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = IdentityOp
    attention, mlp = submodules.self_attention.submodules, submodules.mlp.submodules
    attention.linear_qkv = _column_parallel(attention.linear_qkv)
    mlp.linear_fc1 = _column_parallel(mlp.linear_fc1)


def _column_parallel(linear: type) -> type:
    """The linear layer without the norm that transformer-engine fuses into it."""
    if issubclass(linear, ColumnParallelLinear):
        return linear
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    return TEColumnParallelLinear


def _with_post_norms(layer: Any) -> None:
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    attention.linear_proj = _normed(attention.linear_proj)
    mlp.linear_fc2 = _normed(mlp.linear_fc2)


def _with_expert_biases(experts: Any, config: Any) -> None:
    if experts.module is SequentialMLP:
        experts.submodules.linear_fc2 = with_output_bias(experts.submodules.linear_fc2)
    elif config.expert_tensor_parallel_size > 1:
        raise ValueError(
            "this model's experts have biases, and megatron-core's TEGroupedMLP._apply_bias adds "
            "them once on each expert-tensor-parallel rank; use etp=1"
        )


@cache
def _normed(linear: Any) -> type:
    """A row-parallel linear layer whose output is normed, after it is reduced over the ranks."""

    class Normed(linear):
        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any):
            super().__init__(input_size, output_size, config=config, **options)
            self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            output, bias = super().forward(x)
            assert bias is None, "a bias would have to be added before the norm"
            return self.post_layernorm(output), None

    Normed.__name__ = Normed.__qualname__ = f"Normed{linear.__name__}"
    return Normed


class _Scale:
    """A forward hook that multiplies a module's output, by a factor in the output's dtype."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, _module: Any, _inputs: Any, output: Tensor) -> Tensor:
        return output * torch.tensor(self.factor, dtype=output.dtype, device=output.device)
