"""Writes a live model as a HuggingFace folder: aside first, then renamed into place."""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge import translation
from megatron_bridge.huggingface.folder import CONFIG, load_hf_config
from megatron_bridge.huggingface.quantized import plain_config
from megatron_bridge.huggingface.write import SHARD_BYTES, SafetensorsFolder
from megatron_bridge.live_export import export_weights, weight_dtypes
from megatron_bridge.live_model import Model, origin
from megatron_bridge.mappings import huggingface_shapes
from megatron_bridge.registry import HfConfig, has_value_head
from megatron_bridge.runtime import device
from megatron_bridge.source import TensorInfo, whole


def save_pretrained(
    model: Model,
    source_folder: str | Path,
    destination: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Write the model's weights, config, tokenizer and generation settings to ``destination``.

    Collective: every rank calls it; rank 0 writes. It returns once the folder is in place. A folder
    that was there before is replaced at the end, and stays whole until then. Where rank 0 cannot
    write, every rank raises.

    Args:
        model: from ``build_model``, wrapped or not.
        source_folder: the HuggingFace folder whose config, tokenizer and generation files go along.
        destination: the folder to write.
        shard_bytes: most bytes of one safetensors file.
        changes: fields that config.json is to have beside the model's own, or in their place.

    Raises:
        ValueError: when ``source_folder`` has no config.json; on rank 0, when ``destination`` is
            something else than a model that may be replaced.
        OSError: on rank 0, when it cannot write.
        RuntimeError: on the other ranks, when rank 0 failed; or a peer's process ended.
    """
    source, destination = Path(source_folder), Path(destination)
    config, made = load_hf_config(source), origin(model)
    if has_value_head(made.hf_config) and not has_value_head(config):
        config = made.hf_config  # a head on a base model
    weights = export_weights(model, config)
    if dist.get_rank() == 0:
        try:
            told = plain_config(config, made.dtype) | dict(changes or {})
            _write(weights, source, destination, _infos(config, made.dtype), told, shard_bytes)
        except Exception:
            for _ in weights:
                pass  # peers are sending: they come to the end, and learn of it there
            _all_learn(failed=True)
            raise
        _all_learn(failed=False)
        return
    for _ in weights:
        raise AssertionError("only rank 0 receives weights")
    if _all_learn(failed=False):
        raise RuntimeError(f"rank 0 could not write {destination}; its own error says why")


def _all_learn(*, failed: bool) -> bool:
    """Whether rank 0 failed; every rank returns once it has said so."""
    told = torch.tensor([failed], dtype=torch.int32, device=device.device())
    dist.broadcast(told, src=0)
    return bool(told.item())


def _write(
    weights: Iterator[tuple[str, Tensor]],
    source: Path,
    destination: Path,
    infos: dict[str, TensorInfo],
    config: HfConfig,
    shard_bytes: int,
) -> None:
    _check_replaceable(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    aside = destination.with_name(f".{destination.name}.writing-{os.getpid()}")
    aside.mkdir()
    try:
        folder = SafetensorsFolder.create(aside, infos, shard_bytes=shard_bytes)
        left = set(folder.tensors())
        for name, tensor in weights:
            folder.write(name, whole(tuple(tensor.shape)), tensor)
            left.remove(name)
        assert not left, f"the export lacks {sorted(left)}"
        folder.finish(config, source)
        _put_in_place(aside, destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_replaceable(destination: Path) -> None:
    """Refuse to remove what is no export: a file, or a folder of other things."""
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise ValueError(f"{destination} is a file or a link; name a folder for the export")
    entries = list(destination.iterdir()) if destination.exists() else []
    inside = sorted(entry.name for entry in entries if entry.is_dir())
    model = any(one.name == CONFIG or one.suffix == ".safetensors" for one in entries)
    if inside or (entries and not model):
        what = f"holds the folder '{inside[0]}'" if inside else "holds files, and no model"
        raise ValueError(
            f"{destination} {what}, and an export replaces the whole folder; name another, or "
            "empty it"
        )


def _infos(config: HfConfig, dtype: torch.dtype) -> dict[str, TensorInfo]:
    dtypes = weight_dtypes(config, dtype)
    shapes = huggingface_shapes(translation.resolve(config))
    return {name: TensorInfo(dtypes[name], shape) for name, shape in shapes.items()}


def _put_in_place(aside: Path, destination: Path) -> None:
    """Rename; a folder already there steps aside first and goes away last."""
    if not destination.exists():
        aside.rename(destination)
        return
    old = destination.with_name(f".{destination.name}.old-{os.getpid()}")
    destination.rename(old)
    aside.rename(destination)
    shutil.rmtree(old)
