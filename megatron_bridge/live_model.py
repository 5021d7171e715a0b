"""Builds this rank's Megatron GPTModel and names its parameters across ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge import translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.live_config import transformer_config
from megatron_bridge.mappings import Weight, weights
from megatron_bridge.registry import (
    HfConfig,
    architecture,
    has_score_bias,
    has_value_head,
    labels,
    tied,
    uncovered,
)
from megatron_bridge.row_shape import padded_vocabulary
from megatron_bridge.runtime import device, parallel
from megatron_bridge.sharding import Placement

# A logit of the vocabulary's padding: its probability is exactly zero, and it stays finite when a
# temperature divides it.
_PADDING_LOGIT = -1e30

_DTYPES = (torch.float32, torch.bfloat16)

# One model, or its chunks on this pipeline rank.
Model = torch.nn.Module | Sequence[torch.nn.Module]


@dataclass(frozen=True)
class Origin:
    """What a model was built from; kept on the model as ``bridge_origin``.

    Attributes:
        chunk: which of its pipeline rank's model chunks it is.
    """

    hf_config: HfConfig
    layout: ParallelLayout
    dtype: torch.dtype
    chunk: int = 0


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
        hf_config: config.json of the model; with ``*ForSequenceClassification`` in its
            ``architectures`` the model ends in one score per label instead of the vocabulary.
        layout: the one that ``runtime.parallel.initialize`` was given, without ``vpp``.
        dtype: of parameters and activations: float32 or bfloat16.
        seed: of the random weights.
        transformer_options: further arguments of TransformerConfig, such as recompute settings.

    Raises:
        ValueError: when the config is not supported, or cannot be cut so; for another dtype.
    """
    if layout.vpp != 1:
        raise ValueError(f"vpp={layout.vpp} makes several models a rank: use build_chunks")
    (model,) = build_chunks(hf_config, layout, dtype=dtype, seed=seed, **transformer_options)
    return model


def build_chunks(
    hf_config: HfConfig,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    **transformer_options: Any,
) -> list[torch.nn.Module]:
    """``build_model`` for any ``layout.vpp``: this rank's model chunks, in order."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype} is not one of {', '.join(map(str, _DTYPES))}")
    if layout != parallel.layout():
        raise ValueError(f"{layout} is not the {parallel.layout()} that this process runs in")
    config = translation.resolve(hf_config)
    _check_layout(config, layout)
    from megatron.core import tensor_parallel

    stage = 100 * parallel.coordinates().pp
    tensor_parallel.model_parallel_cuda_manual_seed(seed + stage, force_reset_rng=True)
    transformer = transformer_config(config, layout, dtype, transformer_options)
    chunks = []
    for chunk in range(layout.vpp):
        model = _chunk(config, layout, transformer, chunk, seed)
        model.bridge_origin = Origin(hf_config, layout, dtype, chunk)  # type: ignore[assignment]
        chunks.append(model)
    return chunks


def _chunk(
    config: HfConfig, layout: ParallelLayout, transformer: Any, chunk: int, seed: int
) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel

    from megatron_bridge.runtime import dense_variants
    from megatron_bridge.runtime.specs import layer_spec
    from megatron_bridge.runtime.value_head import ValueHead

    pp = parallel.coordinates().pp
    last = pp == layout.pp - 1 and chunk == layout.vpp - 1
    vp_stage = chunk if layout.vpp > 1 else None
    model: Any = GPTModel(
        transformer,
        layer_spec(transformer, vp_stage),  # type: ignore[arg-type]
        vocab_size=padded_vocabulary(config["vocab_size"], layout.tp),
        pre_process=pp == 0 and chunk == 0,
        post_process=last,
        vp_stage=vp_stage,
        **translation.gpt_arguments(config),
    )
    if last and has_value_head(config):
        model.output_layer = ValueHead(transformer, labels(config), seed, has_score_bias(config))
    dense_variants.finish(model, transformer)
    model = model.to(device.device())
    if last and not has_value_head(config):
        _close_vocabulary(model, config["vocab_size"])
    return model


def _check_layout(config: HfConfig, layout: ParallelLayout) -> None:
    found = layout.problems(config)
    if found:
        raise ValueError(
            "the model cannot be cut so:\n" + "\n".join(f"- {problem}" for problem in found)
        )


def _close_vocabulary(model: torch.nn.Module, vocabulary: int) -> None:
    """Give the vocabulary's padding no probability, on the rank that holds it."""
    output: Any = model.output_layer
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


def chunks_of(model: Model) -> list[torch.nn.Module]:
    """The model's chunks without Megatron's wrappers (DDP, Float16Module)."""
    return [unwrap(model)] if isinstance(model, torch.nn.Module) else [unwrap(m) for m in model]


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside Megatron's wrappers (DDP, Float16Module)."""
    while not hasattr(model, "bridge_origin"):
        inner = getattr(model, "module", None)
        if inner is None:
            raise ValueError("this model was not made by megatron_bridge.live.build_model")
        model = inner
    return model


def origin(model: Model) -> Origin:
    """What the model (or the first of its chunks) was built from."""
    found = chunks_of(model)[0].bridge_origin
    assert isinstance(found, Origin)
    return found


def global_name(model: torch.nn.Module, name: str) -> str:
    """A parameter's name with the layer's number in the whole model, not in this stage."""
    return _renumbered(name, _numbers(model))


def _numbers(model: torch.nn.Module) -> dict[str, int]:
    """The number in the whole model of each layer of this stage, by its number here."""
    layers: Any = model.decoder.layers  # type: ignore[union-attr]
    return {str(index): layer.layer_number - 1 for index, layer in enumerate(layers)}


def _renumbered(name: str, numbers: dict[str, int]) -> str:
    prefix, _, rest = name.partition("decoder.layers.")
    if not rest or prefix:
        return name
    number, _, tail = rest.partition(".")
    return f"decoder.layers.{numbers[number]}.{tail}"


def placement(config: HfConfig, layout: ParallelLayout) -> Placement:
    """Who holds what of a model of this config (resolved)."""
    experts = architecture(config).sizes(config).get("expert", 0)
    return Placement(layout, config["num_hidden_layers"], experts)


class Held(NamedTuple):
    """A parameter (or a buffer with weights) of this rank.

    Attributes:
        weight: what it is part of.
        place: its tensor (or expert tensor) parallel rank.
        tensor: the parameter.
    """

    weight: Weight
    place: int
    tensor: Tensor


def parameters(model: Model, known: list[Weight] | None = None) -> Iterator[Held]:
    """Every parameter of this rank with its weight.

    The copy of a tied embedding on the last stage comes with the embedding's weight.

    Args:
        known: the model's ``weights``, where the caller has them.

    Raises:
        ValueError: for a parameter that no row covers, or a row without its parameter.
    """
    made = origin(model)
    config = translation.resolve(made.hf_config)
    known = weights(config) if known is None else known
    for chunk in chunks_of(model):
        yield from _parameters(chunk, known, config, made.layout)


def _parameters(
    model: torch.nn.Module, known: list[Weight], config: HfConfig, layout: ParallelLayout
) -> Iterator[Held]:
    expected, by_name = _expected(known, placement(config, layout), origin(model).chunk)
    numbers = _numbers(model)
    found = set()
    for local, tensor, is_buffer in _tensors(model):
        name = _renumbered(local, numbers)
        if name == "output_layer.weight" and tied(config):
            name = "embedding.word_embeddings.weight"
        if name not in by_name:
            if is_buffer:
                continue  # state of a computation, not a weight
            table = architecture(config)
            names = {n for row in table.rows_of(config) for n in row.names}
            raise ValueError(uncovered("Megatron parameter", name, names, table))
        weight, place = by_name[name]
        found.add(id(weight))
        yield Held(weight, place, tensor)
    missing = [w.row.megatron for w in expected if id(w) not in found]
    if missing:
        raise ValueError(
            f"the model lacks what the table of {architecture(config).name} lists: "
            + ", ".join(sorted(set(missing)))
        )


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for name, parameter in model.named_parameters():
        yield name, parameter, False
    for name, buffer in model.named_buffers():
        yield name, buffer, True


def _expected(
    known: list[Weight], where: Placement, chunk: int
) -> tuple[list[Weight], dict[str, tuple[Weight, int]]]:
    """The weights of this rank's model chunk, and by every name that they may have."""
    rank = dist.get_rank()
    expected, by_name = [], {}
    for weight in known:
        held = where.place(weight, rank)
        here = held is not None and held[0] == chunk
        if here:
            expected.append(weight)
        if here or weight.row.megatron.startswith("embedding."):
            place = held[1] if held is not None else where.layout.coordinates(rank).tp
            for name in weight.live_names(where.local_expert(weight)):
                by_name[name] = (weight, place)
    return expected, by_name
