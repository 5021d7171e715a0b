"""Loads a HuggingFace checkpoint straight onto this rank's parameters."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge import mappings, translation
from megatron_bridge.checkpoint import Checkpoint, load_hf_config
from megatron_bridge.live_model import Origin, origin, parameters
from megatron_bridge.registry import HfConfig, Match, architecture, head_dim, sizes
from megatron_bridge.runtime import parallel
from megatron_bridge.sharding import Shard, local_index


def load_weights(model: torch.nn.Module, folder: str | Path) -> None:
    """Copy a checkpoint's weights onto the model, in the model's dtype.

    Each rank reads only the rows and columns that it holds. No collective: ranks may call it at
    different times.

    Args:
        model: from ``build_model``, wrapped or not.
        folder: a HuggingFace folder in safetensors format, of the architecture and sizes that the
            model was built with.

    Raises:
        ValueError: listing every tensor that is missing, unknown or of the wrong shape; or saying
            which file is damaged.
    """
    made = origin(model)
    config = translation.resolve(made.hf_config)
    checkpoint = Checkpoint(folder)
    _check_config(checkpoint, config)
    _check(checkpoint, config)
    with torch.no_grad():
        for match, parameter in parameters(model):
            parameter.copy_(_read(checkpoint, match, parameter, config, made))


def _check_config(checkpoint: Checkpoint, config: HfConfig) -> None:
    """Refuse weights of a model that computes something else with the same shapes."""
    theirs = translation.resolve(load_hf_config(checkpoint.folder))
    ours = _computation(config)
    other = {k: v for k, v in _computation(theirs).items() if ours.get(k) != v}
    if other:
        raise ValueError(
            f"{checkpoint.folder}/config.json differs from the config that the model was built "
            f"with: it says {other}; build the model from this folder's config"
        )


def _computation(config: HfConfig) -> dict[str, Any]:
    """What the config decides, apart from the weights' random start."""
    arguments = translation.transformer_arguments(config) | translation.gpt_arguments(config)
    return {k: v for k, v in arguments.items() if k != "init_method_std"}


def _check(checkpoint: Checkpoint, config: HfConfig) -> None:
    """Compare names and shapes with the architecture's table, all at once."""
    table = architecture(config)
    expected, present = table.tensors(config), checkpoint.names()
    found = [f"'{name}' is missing" for name in expected if name not in present]
    for name in sorted(present - expected.keys()):
        if not table.is_ignored(name, config):
            found.append(_unknown(name, config))
    for name in expected.keys() & present:
        shape = checkpoint.shape(name)
        if shape != expected[name]:
            found.append(f"'{name}' has shape {shape}, config.json asks for {expected[name]}")
    if found:
        raise ValueError(
            f"{checkpoint.folder} does not fit its config.json:\n"
            + "\n".join(f"- {one}" for one in found)
        )


def _unknown(name: str, config: HfConfig) -> str:
    try:
        architecture(config).by_huggingface(name, config)
    except ValueError as error:
        return str(error)
    return f"'{name}' is of a layer that config.json's num_hidden_layers does not count"


def _read(
    checkpoint: Checkpoint, match: Match, parameter: Tensor, config: HfConfig, made: Origin
) -> Tensor:
    """This rank's part of one Megatron parameter."""
    tp, rank = made.layout.tp, parallel.coordinates().tp
    shapes = [
        tuple(sizes(config)[dimension] for dimension in shape)
        for shape in match.huggingface.values()
    ]
    if match.row.kind is mappings.Kind.VOCABULARY:
        indices = [_vocabulary_index(shapes[0], parameter.shape[0], rank)]
    else:
        shard = Shard(match.row.cut)
        indices = [local_index(shape, shard, tp, rank) for shape in shapes]
    parts = [
        checkpoint.read(name, index) for name, index in zip(match.huggingface, indices, strict=True)
    ]
    result = mappings.to_megatron(match.row.kind, parts, head_dim(config), parameter.shape[0])
    assert result.shape == parameter.shape, (match, result.shape, parameter.shape)
    return result


def _vocabulary_index(shape: tuple[int, ...], rows: int, rank: int) -> tuple[slice, ...]:
    """The real rows among this rank's ``rows`` of the padded vocabulary."""
    first, last = (min(shape[0], edge * rows) for edge in (rank, rank + 1))
    return (slice(first, last), *(slice(0, size) for size in shape[1:]))
