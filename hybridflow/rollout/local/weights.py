"""The local engine's parameters: a CPU SGLang server's layout with one rank, from safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hybridflow.weight_sync.layout import hf_shapes, server_parameters
from hybridflow.weight_sync.layout.build import dtype_of, put
from megatron_bridge.reshard import TargetParameter

_INDEX = "model.safetensors.index.json"


def empty_parameters(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Zeroed parameters by server name; padding stays zero for good."""
    return {
        parameter.name: torch.zeros(parameter.shape, dtype=dtype_of(parameter, dtype))
        for parameter in server_parameters(config)
    }


def load_into(
    parameters: Mapping[str, torch.Tensor], folder: str | Path, config: Mapping[str, Any]
) -> None:
    """Copy the folder's safetensors into `parameters`, in place.

    Every name and shape is checked first: a ValueError means that no parameter has changed.
    """
    with ExitStack() as stack:
        sources = _open_all(stack, Path(folder))
        _check(sources, config, Path(folder))
        for parameter in server_parameters(config):
            _copy(parameters[parameter.name], parameter, sources)


def _copy(target: torch.Tensor, parameter: TargetParameter, sources: Mapping[str, Any]) -> None:
    for fill in parameter.fills:
        put(target, fill, sources[fill.source].get_tensor(fill.source))


def _open_all(stack: ExitStack, folder: Path) -> dict[str, Any]:
    """Tensor name -> the open safetensors file that holds it."""
    sources: dict[str, Any] = {}
    for path in _files(folder):
        try:
            handle = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
        sources.update(dict.fromkeys(handle.keys(), handle))
    return sources


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Give a HuggingFace model folder.")
    index = folder / _INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ValueError(f"{index} names files outside its folder: {outside[:3]}.")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} holds no safetensors. Other formats are not read: save the model with "
            "safetensors."
        )
    return files


def _check(sources: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> None:
    shapes = hf_shapes(config)
    faults = [f"{name} is missing" for name in shapes if name not in sources]
    for name in sources:
        if name not in shapes:
            if not (name == "lm_head.weight" and config.get("tie_word_embeddings")):
                faults.append(f"{name} is unknown")
            continue
        view = sources[name].get_slice(name)
        if tuple(view.get_shape()) != shapes[name]:
            faults.append(
                f"{name} has shape {tuple(view.get_shape())}, config makes it {shapes[name]}"
            )
        if view.get_dtype() not in ("F32", "BF16", "F16"):
            faults.append(f"{name} is {view.get_dtype()}, not a float type that is read")
    if faults:
        raise ValueError(f"{folder}: {len(faults)} faults: " + "; ".join(faults[:5]) + ".")
