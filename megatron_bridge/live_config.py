"""Megatron's TransformerConfig of a model: what config.json, the layout and the machine decide."""

from typing import Any

import torch
from torch import Tensor

from megatron_bridge import translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.registry import HfConfig
from megatron_bridge.runtime import device


def _activation(name: str) -> Any:
    """Megatron's activation function of this name."""
    functions: dict[str, Any] = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": _gelu_tanh,
    }
    if name == "quick_gelu":
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        return quick_gelu
    return functions[name]


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def transformer_config(
    config: HfConfig, layout: ParallelLayout, dtype: torch.dtype, options: dict[str, Any]
) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from megatron_bridge.runtime.features import Features

    ours = translation.transformer_arguments(config)
    ours["activation_func"] = _activation(ours.pop("activation", "silu"))
    arguments: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Packs of different lengths follow each other; with them Megatron wants this dispatcher,
        # experts or not.
        "variable_seq_lengths": layout.pp > 1,
        "moe_token_dispatcher_type": "alltoall",
        # Torch-compiled on the CPU, and without gain there.
        "bias_dropout_fusion": device.on_gpu(),
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    if layout.vpp > 1:
        arguments |= {
            "virtual_pipeline_model_parallel_size": layout.vpp,
            # With two stages Megatron's batched exchange of interleaved chunks is silently wrong.
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    kind = MLATransformerConfig if ours.get("multi_latent_attention") else TransformerConfig
    made = kind(**arguments | ours | options)
    made.bridge = Features(**translation.features(config))  # type: ignore[attr-defined]
    # TransformerConfig refuses them for experts under expert tensor parallelism, where Megatron's
    # experts add them once on each rank; ours do not (see runtime.expert_bias).
    made.add_bias_linear |= made.bridge.linear_biases  # type: ignore[attr-defined]
    return made
