"""Writing a version of the weights as a HuggingFace folder, tensor by tensor.

The safetensors header needs every name, shape and offset first. The config states them, so the
file is laid out before the first tensor comes and no second copy of the model is ever held.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hybridflow.recipe.names import hint
from hybridflow.weight_sync.delta_manifest import chain
from hybridflow.weight_sync.layout import hf_shapes

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_SPARE_BYTES = 16 << 20


def write_version(
    directory: str | Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    source_model_folder: str | Path,
    version: int,
    *,
    replace: bool = False,
) -> Path:
    """Write `directory`/v`version`, a HuggingFace folder, and return its path.

    `weights` yields full (HuggingFace name, tensor) pairs in any order, all of one dtype; the
    config is copied from `source_model_folder` and its tokenizer's files are linked. It is written
    aside and renamed, so a folder of that name is always whole. With `replace` it takes the place
    of one that is there, which nobody may be reading. ValueError for missing, unknown or repeated
    names, a wrong shape, or too little space.
    """
    source, parent = Path(source_model_folder), Path(directory)
    target = parent / f"v{version}"
    if target.exists() and not replace:
        raise ValueError(f"{target} exists already; a version is written once.")
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    config = read_config(source)
    aside = parent / f".v{version}.{uuid.uuid4().hex[:8]}"
    aside.mkdir(mode=0o700)
    try:
        dtype = _write_weights(aside / "model.safetensors", weights, config)
        _add_companions(source, aside, config, dtype)
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def remove_versions(directory: str | Path, keep: int | None = None) -> list[Path]:
    """Remove written versions from `directory`; returns what went.

    `keep` stays, and what it is built from when it is a delta.
    """
    kept: set[str] = set()
    if keep is not None and (Path(directory) / f"v{keep}").is_dir():
        kept = {f"v{version}" for version in chain(directory, keep)}
    removed = []
    for folder in sorted(Path(directory).glob("v[0-9]*")):
        if folder.name not in kept and folder.name[1:].isdigit():
            shutil.rmtree(folder)
            removed.append(folder)
    return removed


def read_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a HuggingFace folder; ValueError when there is none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Give a HuggingFace model folder.")
    return json.loads(path.read_text())


def _write_weights(
    path: Path, weights: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any]
) -> torch.dtype:
    """Write one safetensors file from a stream; returns the tensors' dtype."""
    shapes = hf_shapes(config)
    tied = bool(config.get("tie_word_embeddings"))
    missing = set(shapes)
    offsets: dict[str, int] = {}
    dtype: torch.dtype | None = None
    with path.open("wb", buffering=0) as file:
        for name, tensor in weights:
            if name == "lm_head.weight" and tied:
                continue
            check_weight(name, tensor, shapes, missing, dtype)
            if dtype is None:
                dtype = tensor.dtype
                offsets = _lay_out(file, shapes, dtype, path)
            _write_at(file, offsets[name], tensor)
            missing.remove(name)
    if dtype is None or missing:
        raise ValueError(
            f"version not written: {len(missing)} weights are missing, among them "
            f"{sorted(missing)[:3]}."
        )
    return dtype


def check_weight(
    name: str,
    tensor: torch.Tensor,
    shapes: Mapping[str, tuple[int, ...]],
    missing: Collection[str],
    dtype: torch.dtype | None,
) -> None:
    """ValueError unless `tensor` is one of the `missing` weights, of its shape and of `dtype`."""
    if name not in missing:
        what = "came twice" if name in shapes else "is unknown"
        raise ValueError(f"weight {name!r} {what}; {hint(name, missing)}")
    if tuple(tensor.shape) != shapes[name]:
        raise ValueError(
            f"weight {name!r} has shape {tuple(tensor.shape)}; config.json makes it {shapes[name]}."
        )
    if tensor.dtype not in _DTYPES or tensor.dtype != (dtype or tensor.dtype):
        raise ValueError(
            f"weight {name!r} is {tensor.dtype}; a version holds one dtype"
            f" ({dtype or ', '.join(str(known) for known in _DTYPES)})."
        )


def _lay_out(file: BinaryIO, shapes, dtype: torch.dtype, path: Path) -> dict[str, int]:
    """Write the header, reserve the whole file, and return each tensor's place in it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    check_space(path.parent.parent, start + at)
    os.posix_fallocate(file.fileno(), 0, start + at)
    os.pwrite(file.fileno(), len(text).to_bytes(8, "little") + text, 0)
    return {name: start + header[name]["data_offsets"][0] for name in shapes}


def check_space(folder: Path, needed: int) -> None:
    """ValueError when `folder` has no room for `needed` bytes and some to spare."""
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE_BYTES:
        raise ValueError(
            f"{folder} has {free / 1e6:.0f} MB free; the version needs "
            f"{(needed + _SPARE_BYTES) / 1e6:.0f} MB. Free some, or set another "
            "roles.rollout.sync.directory."
        )


def _write_at(file: BinaryIO, offset: int, tensor: torch.Tensor) -> None:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    data = flat.numpy().data
    while data:
        written = os.pwrite(file.fileno(), data, offset)
        data, offset = data[written:], offset + written


def _add_companions(
    source: Path, target: Path, config: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """The config, with the dtype written, and links to the tokenizer's files; no weights."""
    for path in source.iterdir():
        is_index = path.name.endswith(".index.json")
        if path.is_file() and path.suffix in _COMPANIONS and not is_index:
            (target / path.name).symlink_to(path.resolve())
    (target / "config.json").unlink()
    named = {**config, "dtype": str(dtype).removeprefix("torch.")}
    named.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(named, indent=2) + "\n")
