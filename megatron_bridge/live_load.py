"""Loads a HuggingFace checkpoint straight onto this rank's parameters."""

from pathlib import Path
from typing import Any

import torch

from megatron_bridge import regions, translation
from megatron_bridge.agreement import check_tensors
from megatron_bridge.huggingface import value_heads
from megatron_bridge.huggingface.folder import HuggingFaceFolder
from megatron_bridge.huggingface.quantized import dequantized
from megatron_bridge.live_model import Held, Model, origin, parameters
from megatron_bridge.mappings import shapes_of, weights
from megatron_bridge.reading import fill_megatron
from megatron_bridge.registry import HfConfig, has_value_head
from megatron_bridge.sharding import holdings
from megatron_bridge.source import Source

HEAD = ("score.weight", "score.bias")


def load_weights(model: Model, folder: str | Path, *, fresh_head: bool = False) -> None:
    """Copy a checkpoint's weights onto the model, in the model's dtype.

    Each rank reads only the rows and columns that it holds. Quantised weights are read as what
    they stand for. No collective: ranks may call it at different times.

    Args:
        model: from ``build_model``, wrapped or not; or the chunks of ``build_chunks``.
        folder: a HuggingFace folder of the architecture and sizes that the model was built with.
        fresh_head: leave the value head (``score.weight``) as it is; then the folder may be that
            of the base model, whose ``lm_head.weight`` is passed over.

    Raises:
        ValueError: listing every tensor that is missing, unknown or of the wrong shape; or saying
            which file is damaged.
    """
    made = origin(model)
    config = translation.resolve(made.hf_config)
    if fresh_head and not has_value_head(config):
        raise ValueError("fresh_head needs a model with a value head; see live.with_value_head")
    opened = HuggingFaceFolder(folder)
    separate = value_heads.is_separate(opened)
    _check_config(opened, config, fresh_head or separate)
    source = dequantized(opened, opened.config(), made.dtype)
    source = value_heads.Named(source) if separate else source
    known = weights(config)
    expected = shapes_of(known)
    if fresh_head:
        expected = {name: shape for name, shape in expected.items() if name not in HEAD}
    elif has_value_head(config) and "score.weight" not in source.tensors():
        raise ValueError(
            f"{folder} is a base model: 'score.weight' is missing; load it with fresh_head=True to "
            "keep the model's own value head"
        )
    passed = {"lm_head.weight"} if fresh_head or separate else set()
    check_tensors(source, config, expected, folder, passed=passed)
    with torch.no_grad():
        for held in parameters(model, known):
            if held.weight.name_of(held.weight.row.parts[0].name) in expected:
                _fill(source, held, made.layout.expert_tp, made.layout.tp)


def _fill(source: Source, held: Held, expert_tp: int, tp: int) -> None:
    """Copy this rank's rectangles of one weight."""
    parts = expert_tp if held.weight.row.per_expert else tp
    for holding in holdings(held.weight, parts, held.place):
        rows = held.tensor[holding.rows[0] : holding.rows[1]]
        target = rows.view(regions.lengths(holding.box))
        fill_megatron(source, held.weight, holding.box, target)


def _check_config(folder: HuggingFaceFolder, config: HfConfig, own_head: bool) -> None:
    """Refuse weights of a model that computes something else with the same shapes; ``own_head``:
    the folder's config need not tell of the head."""
    theirs = folder.config()
    if own_head and not has_value_head(theirs):
        theirs = translation.with_value_head(theirs)
    ours = _computation(config)
    other = {k: v for k, v in _computation(translation.resolve(theirs)).items() if ours.get(k) != v}
    if other:
        raise ValueError(
            f"{folder.path}/config.json differs from the config that the model was built "
            f"with: it says {other}; build the model from this folder's config"
        )


def _computation(config: HfConfig) -> dict[str, Any]:
    """What the config decides, apart from the weights' random start."""
    arguments = (
        translation.transformer_arguments(config)
        | translation.gpt_arguments(config)
        | translation.features(config)
    )
    return {k: v for k, v in arguments.items() if k != "init_method_std"}
