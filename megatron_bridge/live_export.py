"""Streams a parallel model's weights as whole HuggingFace tensors to rank 0."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge import mappings, translation
from megatron_bridge.live_model import origin, parameters
from megatron_bridge.mappings import Kind, padded_vocabulary
from megatron_bridge.registry import HfConfig, Match, architecture, head_dim, sizes
from megatron_bridge.runtime import device, parallel
from megatron_bridge.sharding import Shard, join


def export_weights(model: torch.nn.Module, hf_config: HfConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (HuggingFace name, whole tensor) on rank 0, in the model's order and dtype.

    Collective: every rank calls it and exhausts it; the other ranks yield nothing. One parameter
    is gathered at a time. A yielded tensor may share the live parameter's memory: copy it before
    the model changes.

    Args:
        model: from ``build_model``, wrapped or not.
        hf_config: config.json of the model.

    Raises:
        ValueError: for a parameter that no row covers, or when the config is not the model's.
    """
    config = translation.resolve(hf_config)
    made = origin(model)
    if architecture(config).tensors(config) != _own_tensors(made.hf_config):
        raise ValueError("hf_config is not the config that this model was built with")
    held = _held(model)
    here = parallel.coordinates()
    if here.dp != 0:
        return
    for match in architecture(config).matches(config):
        stage = _stage(match, config["num_hidden_layers"], made.layout.pp)
        whole = _gather(match, held.get(match.row.megatron[0], {}), stage, config, made.dtype)
        if whole is not None:
            yield from _huggingface(match, whole, config)


def _own_tensors(hf_config: HfConfig) -> dict[str, tuple[int, ...]]:
    config = translation.resolve(hf_config)
    return architecture(config).tensors(config)


def _held(model: torch.nn.Module) -> dict[str, dict[int | None, Tensor]]:
    """This rank's parameters by their row's first Megatron name and layer.

    Where one rank holds a tied embedding twice the first, the embedding itself, counts.
    """
    held: dict[str, dict[int | None, Tensor]] = {}
    for match, parameter in parameters(model):
        held.setdefault(match.row.megatron[0], {}).setdefault(match.layer, parameter.detach())
    return held


def _stage(match: Match, layers: int, pp: int) -> int:
    """The pipeline stage that owns a row: the embedding first, what follows the layers last."""
    if match.layer is not None:
        return match.layer // (layers // pp)
    return 0 if match.row.megatron[0].startswith("embedding.") else pp - 1


def _gather(
    match: Match,
    held: dict[int | None, Tensor],
    stage: int,
    config: HfConfig,
    dtype: torch.dtype,
) -> list[Tensor] | None:
    """Every tensor-parallel part of one parameter on rank 0, in rank order; None elsewhere."""
    here, layout = parallel.coordinates(), parallel.layout()
    parts: list[Tensor] | None = None
    if here.pp == stage:
        parts = _gather_over_tp(held[match.layer], match)
    if stage == 0 or here.tp != 0:
        return parts if here.pp == 0 and here.tp == 0 else None
    return _send_to_first_stage(parts, match, stage, config, dtype, layout.tp)


def _gather_over_tp(part: Tensor, match: Match) -> list[Tensor] | None:
    """The parts on tensor-parallel rank 0; None on the others."""
    layout, here = parallel.layout(), parallel.coordinates()
    if layout.tp == 1 or match.row.cut is None:
        return [part] if here.tp == 0 else None
    parts = [torch.empty_like(part) for _ in range(layout.tp)] if here.tp == 0 else None
    dist.gather(part.contiguous(), parts, group=parallel.tensor_group(), group_dst=0)
    return parts


def _send_to_first_stage(
    parts: list[Tensor] | None,
    match: Match,
    stage: int,
    config: HfConfig,
    dtype: torch.dtype,
    tp: int,
) -> list[Tensor] | None:
    """Move the parts along the pipeline from ``stage`` to rank 0, one after the other."""
    group = parallel.pipeline_group()
    here = parallel.coordinates()
    if here.pp == stage:
        assert parts is not None
        for part in parts:
            dist.send(part.contiguous(), group=group, group_dst=0)
        return None
    if here.pp != 0:
        return None
    shape = _part_shape(match, config, tp)
    received = []
    for _ in range(tp if match.row.cut is not None else 1):
        part = torch.empty(shape, dtype=dtype, device=device.device())
        dist.recv(part, group=group, group_src=stage)
        received.append(part)
    return received


def _part_shape(match: Match, config: HfConfig, tp: int) -> tuple[int, ...]:
    """The shape of one rank's part of a Megatron parameter."""
    size = sizes(config)
    shapes = [tuple(size[dimension] for dimension in s) for s in match.row.huggingface.values()]
    rows = sum(shape[0] for shape in shapes)
    if match.row.kind is Kind.VOCABULARY:
        rows = padded_vocabulary(rows, tp)
    shape = [rows, *shapes[0][1:]]
    if match.row.cut is not None:
        shape[match.row.cut] //= tp
    return tuple(shape)


def _huggingface(
    match: Match, parts: list[Tensor], config: HfConfig
) -> Iterator[tuple[str, Tensor]]:
    """The row's HuggingFace tensors from the parameter's parts."""
    size, tp = sizes(config), len(parts)
    rows = [size[shape[0]] for shape in match.row.huggingface.values()]
    shard = Shard(match.row.cut)
    if match.row.kind in (Kind.PLAIN, Kind.VOCABULARY):
        whole = join(parts, shard)
        tensors = mappings.to_huggingface(match.row.kind, whole, head_dim(config), rows)
    else:
        local = [count // tp for count in rows]
        cut = [mappings.to_huggingface(match.row.kind, p, head_dim(config), local) for p in parts]
        tensors = [join(pieces, shard) for pieces in zip(*cut, strict=True)]
    yield from zip(match.huggingface, (t.contiguous() for t in tensors), strict=True)
