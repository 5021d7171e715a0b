"""Builds this rank's Megatron GPTModel and names its parameters across ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_bridge import translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import padded_vocabulary
from megatron_bridge.registry import HfConfig, Match, architecture, tied
from megatron_bridge.runtime import device, parallel

# A logit of the vocabulary's padding: its probability is exactly zero, and it stays finite when a
# temperature divides it.
_PADDING_LOGIT = -1e30


@dataclass(frozen=True)
class Origin:
    """What a model was built from; kept on the model as ``bridge_origin``."""

    hf_config: HfConfig
    layout: ParallelLayout
    dtype: torch.dtype


def build_model(
    hf_config: HfConfig,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    **transformer_options: Any,
) -> torch.nn.Module:
    """This rank's part of a GPTModel with random weights.

    Args:
        hf_config: config.json of the model.
        layout: the one that ``runtime.parallel.initialize`` was given.
        dtype: of parameters and activations: float32 or bfloat16.
        seed: of the random weights.
        transformer_options: further arguments of TransformerConfig, such as recompute settings.

    Raises:
        ValueError: when the config is not supported, or cannot be cut so.
    """
    if layout != parallel.layout():
        raise ValueError(f"{layout} is not the {parallel.layout()} that this process runs in")
    config = translation.resolve(hf_config)
    _check_layout(config, layout)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel

    from megatron_bridge.runtime.specs import layer_spec

    stage = 100 * parallel.coordinates().pp
    tensor_parallel.model_parallel_cuda_manual_seed(seed + stage, force_reset_rng=True)
    transformer = _transformer_config(config, layout, dtype, transformer_options)
    model = GPTModel(
        transformer,
        layer_spec(transformer),
        vocab_size=padded_vocabulary(config["vocab_size"], layout.tp),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **translation.gpt_arguments(config),
    ).to(device.device())
    model.bridge_origin = Origin(hf_config, layout, dtype)  # type: ignore[assignment]
    _close_vocabulary(model, config["vocab_size"])
    return model


def _check_layout(config: HfConfig, layout: ParallelLayout) -> None:
    found = layout.problems(config)
    if found:
        raise ValueError(
            "the model cannot be cut so:\n" + "\n".join(f"- {problem}" for problem in found)
        )


def _transformer_config(
    config: HfConfig, layout: ParallelLayout, dtype: torch.dtype, options: dict[str, Any]
) -> Any:
    from megatron.core.transformer import TransformerConfig

    arguments: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "activation_func": torch.nn.functional.silu,
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
    return TransformerConfig(**arguments | translation.transformer_arguments(config) | options)


def _close_vocabulary(model: torch.nn.Module, vocabulary: int) -> None:
    """Give the vocabulary's padding no probability, on the rank that holds it."""
    output = getattr(model, "output_layer", None)
    if output is None:
        return
    per_rank = output.output_size_per_partition
    first = parallel.coordinates().tp * per_rank
    real = min(max(vocabulary - first, 0), per_rank)
    if real == per_rank:
        return

    def close(_module: Any, _inputs: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = outputs
        logits[..., real:] = _PADDING_LOGIT
        return logits, bias

    output.register_forward_hook(close)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside Megatron's wrappers (DDP, Float16Module)."""
    while not hasattr(model, "bridge_origin"):
        inner = getattr(model, "module", None)
        if inner is None:
            raise ValueError("this model was not made by megatron_bridge.live.build_model")
        model = inner
    return model


def origin(model: torch.nn.Module) -> Origin:
    """What the model was built from."""
    found = unwrap(model).bridge_origin
    assert isinstance(found, Origin)
    return found


def global_name(model: torch.nn.Module, name: str) -> str:
    """A parameter's name with the layer's number in the whole model, not in this stage."""
    prefix, _, rest = name.partition("decoder.layers.")
    if not rest or prefix:
        return name
    number, _, tail = rest.partition(".")
    layer = model.decoder.layers[int(number)].layer_number - 1  # type: ignore[union-attr,index]
    return f"decoder.layers.{layer}.{tail}"


def parameters(model: torch.nn.Module) -> Iterator[tuple[Match, Tensor]]:
    """Every parameter of this rank with its row.

    The copy of a tied embedding on the last stage comes with the embedding's row.

    Raises:
        ValueError: for a parameter that no row covers.
    """
    model = unwrap(model)
    config = translation.resolve(origin(model).hf_config)
    table = architecture(config)
    for local, parameter in model.named_parameters():
        name = global_name(model, local)
        if name == "output_layer.weight" and tied(config):
            name = "embedding.word_embeddings.weight"
        yield table.by_megatron(name, config), parameter
