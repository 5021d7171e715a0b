"""Writes a live model as a HuggingFace folder: aside first, then renamed into place."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge import translation
from megatron_bridge.checkpoint import load_hf_config
from megatron_bridge.live_export import export_weights, weight_dtypes
from megatron_bridge.live_model import Model, origin
from megatron_bridge.mappings import huggingface_shapes
from megatron_bridge.runtime import device
from megatron_bridge.safetensors_stream import TensorSpec, write_stream

SHARD_BYTES = 5 * 10**9

# What belongs to a model besides its weights; code (*.py) is not copied.
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
    "LICENSE*",
)


def save_pretrained(
    model: Model,
    source_folder: str | Path,
    destination: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the model's weights, config, tokenizer and generation settings to ``destination``.

    Collective: every rank calls it; rank 0 writes. It returns once the folder is in place. A folder
    that was there before is replaced at the end, and stays whole until then.

    Args:
        model: from ``build_model``, wrapped or not.
        source_folder: the HuggingFace folder whose config, tokenizer and generation files go along.
        destination: the folder to write.
        shard_bytes: most bytes of one safetensors file.

    Raises:
        ValueError: when ``source_folder`` has no config.json, or holds ``destination``'s own files.
    """
    source, destination = Path(source_folder), Path(destination)
    config = load_hf_config(source)
    weights = export_weights(model, config)
    if dist.get_rank() == 0:
        _write(weights, source, destination, config, origin(model).dtype, shard_bytes)
    else:
        for _ in weights:
            raise AssertionError("only rank 0 receives weights")
    dist.barrier()


def _write(
    weights: Iterator[tuple[str, Tensor]],
    source: Path,
    destination: Path,
    config: dict[str, Any],
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    aside = destination.with_name(f".{destination.name}.writing-{os.getpid()}")
    aside.mkdir()
    try:
        _write_weights(weights, aside, config, dtype, shard_bytes)
        _write_config(aside, config, dtype)
        _copy_others(source, aside)
        _put_in_place(aside, destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_weights(
    weights: Iterator[tuple[str, Tensor]],
    folder: Path,
    config: dict[str, Any],
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    dtypes = weight_dtypes(config, dtype)
    shapes = huggingface_shapes(translation.resolve(config))
    specs = [TensorSpec(name, dtypes[name], shape) for name, shape in shapes.items()]
    shards = plan_shards(specs, shard_bytes)
    names = _file_names(len(shards))
    for file, shard in zip(names, shards, strict=True):
        write_stream(folder / file, shard, weights)
    left = next(weights, None)
    assert left is None, f"the export has '{left[0]}' left over"
    if len(shards) > 1:
        placed = zip(names, shards, strict=True)
        index = {
            "metadata": {"total_size": sum(spec.bytes for spec in specs)},
            "weight_map": {spec.name: file for file, shard in placed for spec in shard},
        }
        _write_json(folder / "model.safetensors.index.json", index)


def plan_shards(specs: list[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Cut the tensors, in order, into files of at most ``shard_bytes`` (or of one tensor)."""
    shards: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if shards[-1] and used + spec.bytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.bytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _write_config(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """config.json with the dtype that the weights are in."""
    old = config.keys() & {"dtype", "torch_dtype"}
    fields = dict.fromkeys(old or {"dtype"}, device.dtype_name(dtype))
    _write_json(folder / "config.json", {**config, **fields})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_others(source: Path, folder: Path) -> None:
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file() and path.suffix != ".py":
                shutil.copyfile(path, folder / path.name)
    if (source / "chat_templates").is_dir():
        shutil.copytree(source / "chat_templates", folder / "chat_templates")


def _put_in_place(aside: Path, destination: Path) -> None:
    """Rename; a folder already there steps aside first and goes away last."""
    if not destination.exists():
        aside.rename(destination)
        return
    old = destination.with_name(f".{destination.name}.old-{os.getpid()}")
    destination.rename(old)
    aside.rename(destination)
    shutil.rmtree(old)
