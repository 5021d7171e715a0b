"""A checkpoint of one engine: safetensors files a rank, scalars in JSON; nothing is pickled.

Layout of the folder::

    engine.json                   version, layout, dtype, counters
    tp0_pp0.safetensors           parameters (model/...) and optimizer state (exp_avg/... and so on)
    etp0_ep0_pp0.safetensors      the same of experts, where they have a layout of their own

Replicas are equal, so the first of them writes for all. The folder is written aside and renamed
when every rank is done: under its own name it is always whole.
"""

import json
import os
import shutil
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_bridge.engine_files import DESCRIPTION, VERSION, experts_file_name, file_name
from megatron_bridge.layout import ParallelLayout

_SCALARS = DESCRIPTION
MEND = "restore it, or remove this checkpoint's folder to resume from the one before"


def save(
    folder: Path,
    layout: ParallelLayout,
    tensors: dict[str, Tensor],
    scalars: dict[str, Any],
    experts: frozenset[str] = frozenset(),
) -> None:
    """Writes this rank's part; collective. Replaces a checkpoint of the same name.

    Args:
        folder: one that all ranks see.
        tensors: by ``kind/parameter name``.
        scalars: what else there is to keep; values of JSON.
        experts: names of the parameters that the layout places by the experts' coordinates.
    """
    aside = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    apart = {name for name in tensors if name.partition("/")[2] in experts}
    if layout.coordinates(dist.get_rank()).dp == 0:
        _write(aside / _file_name(layout), tensors, tensors.keys() - apart)
    if apart and layout.expert_coordinates(dist.get_rank()).edp == 0:
        _write(aside / _experts_file_name(layout), tensors, apart)
    if dist.get_rank() == 0:
        content = {"version": VERSION, "layout": asdict(layout), **scalars}
        (aside / _SCALARS).write_text(json.dumps(content, indent=2), encoding="utf-8")
    dist.barrier()
    if dist.get_rank() == 0:
        _replace(aside, folder)
    dist.barrier()


def _write(path: Path, tensors: dict[str, Tensor], names: Collection[str]) -> None:
    save_file({name: tensors[name].detach().contiguous() for name in sorted(names)}, path)
    with open(path, "rb") as file:  # before the run's own record calls the checkpoint whole
        os.fsync(file.fileno())


def load(
    folder: Path, layout: ParallelLayout, experts: frozenset[str] = frozenset()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's tensors, on the CPU, and the scalars; arguments as of ``save``.

    Raises:
        ValueError: there is no checkpoint here, it is of another layout or version, or damaged.
    """
    path = folder / _SCALARS
    if not path.is_file():
        raise ValueError(f"{folder} holds no engine checkpoint: {_SCALARS} is missing")
    try:
        scalars = json.loads(path.read_text(encoding="utf-8"))
        version = scalars["version"]
        saved = ParallelLayout(**scalars["layout"]) if version == VERSION else None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}; {MEND}") from error
    if version != VERSION:
        raise ValueError(
            f"{folder} is a checkpoint of version {version}; this code reads {VERSION}"
        )
    if saved != layout:
        raise ValueError(
            f"{folder} was saved at {saved} and this run is at {layout}; resume at "
            "the saved layout, or start a new run from the exported model"
        )
    tensors = _read(folder / _file_name(layout))
    if experts:
        tensors |= _read(folder / _experts_file_name(layout))
    return tensors, scalars


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}; {MEND}") from error


def _file_name(layout: ParallelLayout) -> str:
    return file_name(layout.coordinates(dist.get_rank()))


def _experts_file_name(layout: ParallelLayout) -> str:
    return experts_file_name(layout.expert_coordinates(dist.get_rank()))


def _replace(new: Path, folder: Path) -> None:
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def fill(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    """Copies tensors by name into ``target``'s memory.

    Raises:
        ValueError: names or shapes differ.
    """
    if unmatched := sorted(target.keys() ^ source.keys()):
        raise ValueError(f"checkpoint and model differ in {unmatched[:5]}; use the same model")
    with torch.no_grad():
        for name, tensor in target.items():
            if tensor.shape != source[name].shape:
                raise ValueError(
                    f"checkpoint: '{name}' is {list(source[name].shape)}, the model has "
                    f"{list(tensor.shape)}; use the same model"
                )
            tensor.copy_(source[name])
