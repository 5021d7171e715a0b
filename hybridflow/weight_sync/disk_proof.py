"""That a version's file holds what its writer read from the model, tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hybridflow.weight_sync.delta_manifest import WEIGHTS
from hybridflow.weight_sync.inbox import WeightMismatch
from megatron_bridge.huggingface.safetensors_file import SafetensorsFile

_BLOCK = 4 << 20
_THREADS = 4


class TensorHashes:
    """SHA-256 of the tensors that pass by, as they are in the model.

    Attributes:
        tensors: by name; without the output layer of a model that ties it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._tied = bool(config.get("tie_word_embeddings"))
        self.tensors: dict[str, str] = {}

    def watch(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass ``weights`` through."""
        for name, tensor in weights:
            if not (self._tied and name == "lm_head.weight"):
                flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                self.tensors[name] = hashlib.sha256(flat.numpy().data).hexdigest()
            yield name, tensor


def require_tensors(folder: Path, tensors: Mapping[str, str]) -> None:
    """The folder's file holds these tensors, by their SHA-256.

    Raises:
        WeightMismatch: names what differs.
    """
    path = folder / WEIGHTS
    try:
        file = SafetensorsFile(path)
        missing = sorted(tensors.keys() ^ file.infos.keys())
        if missing:
            raise WeightMismatch(f"{path} lacks or adds {missing[:3]} ({len(missing)} tensors)")
        with ThreadPoolExecutor(_THREADS, "prove") as pool:
            found = dict(zip(tensors, pool.map(lambda n: _digest(file, n), tensors), strict=True))
    except (OSError, ValueError) as error:
        raise WeightMismatch(f"{path} is damaged: {error}") from error
    damaged = sorted(name for name in tensors if found[name] != tensors[name])
    if damaged:
        raise WeightMismatch(
            f"{path} is damaged: {len(damaged)} of {len(tensors)} tensors are not what the trainer "
            f"wrote, among them {damaged[:3]}"
        )


def _digest(file: SafetensorsFile, name: str) -> str:
    total, left = hashlib.sha256(), file.infos[name].bytes
    with file.path.open("rb", buffering=0) as source:
        source.seek(file.offset(name))
        while left:
            block = source.read(min(left, _BLOCK))
            if not block:
                raise ValueError(f"it ends within {name}")
            total.update(block)
            left -= len(block)
    return total.hexdigest()
