"""Publishing as it is done elsewhere: whole tensors gathered on rank 0, cut again by the server.

Each way is one that RL frameworks use with SGLang's own endpoints, and none proves anything.
"""

from __future__ import annotations

import base64
import io
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.rollout.client import RolloutClient
from hybridflow.weight_sync.pairs.broadcast_group import BroadcastGroup

_SECONDS = 120.0
_BUCKET = 512 << 20
Weights = Iterator[tuple[str, Tensor]]


class Gather(Protocol):
    """Rank 0's way of pushing what it gathers."""

    def push(self, weights: Weights, version: int) -> dict[str, Any]:
        """Push a version; ``seconds`` by step and ``bytes`` to all of the server's ranks."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class ByBroadcast:
    """update_weights_from_distributed, a call and a broadcast for each tensor (OpenRLHF, slime)."""

    def __init__(self, url: str, tp: int, local: Path) -> None:
        self._client, self._tp = RolloutClient(url, timeout=_SECONDS), tp
        self._name = f"gather-{uuid.uuid4().hex}"
        self._group = BroadcastGroup("gloo", "127.0.0.1", 1 + tp, self._name, _SECONDS)
        self._pool = ThreadPoolExecutor(1)
        joining = self._pool.submit(
            self._client.join_weight_group, self._group.invitation, _SECONDS
        )
        self._group.join()
        joining.result()

    def push(self, weights: Weights, version: int) -> dict[str, Any]:
        """See ``Gather``."""
        sent = 0

        def load() -> None:
            nonlocal sent
            self._client.begin_weight_update()
            for name, tensor in weights:
                told = self._pool.submit(self._update, name, tensor)
                self._group.broadcast(tensor.contiguous())
                self._group.flush()
                told.result()
                sent += tensor.nbytes
            self._client.end_weight_update()
            self._client.flush_cache()

        return {"seconds": _paused(self._client, version, load), "bytes": self._tp * sent}

    def _update(self, name: str, tensor: Tensor) -> None:
        body = {
            "names": [name],
            "dtypes": [str(tensor.dtype).removeprefix("torch.")],
            "shapes": [list(tensor.shape)],
            "group_name": self._name,
            "flush_cache": False,
        }
        self._client._call("POST", "/update_weights_from_distributed", body)

    def close(self) -> None:
        """Leave the group."""
        self._client.leave_weight_group(self._name, _SECONDS)
        self._pool.shutdown()
        self._client.close()


class ByTensor:
    """update_weights_from_tensor with handles of shared memory, in buckets (verl)."""

    def __init__(self, url: str, tp: int, local: Path) -> None:
        self._client, self._tp = RolloutClient(url, timeout=_SECONDS), tp
        torch.multiprocessing.set_sharing_strategy("file_system")  # the one that SGLang takes

    def push(self, weights: Weights, version: int) -> dict[str, Any]:
        """See ``Gather``."""
        sent = 0

        def load() -> None:
            nonlocal sent
            self._client.begin_weight_update()
            for bucket in _buckets(weights):
                self._update(bucket)
                sent += sum(tensor.nbytes for _, tensor in bucket)
            self._client.end_weight_update()
            self._client.flush_cache()

        return {"seconds": _paused(self._client, version, load), "bytes": self._tp * sent}

    def _update(self, bucket: list[tuple[str, Tensor]]) -> None:
        buffers = [io.BytesIO() for _ in range(self._tp)]
        for buffer in buffers:
            ForkingPickler(buffer).dump(bucket)
        named = [base64.b64encode(buffer.getvalue()).decode() for buffer in buffers]
        body = {"serialized_named_tensors": named, "flush_cache": False}
        self._client._call("POST", "/update_weights_from_tensor", body)

    def close(self) -> None:
        """Nothing is held."""
        self._client.close()


class ByDisk:
    """A checkpoint saved and loaded, in shared memory, the quickest disk there is."""

    def __init__(self, url: str, tp: int, local: Path) -> None:
        self._client, self._tp = RolloutClient(url, timeout=_SECONDS), tp
        self._folder = local / "gathered"
        source = Path(self._client.model_info()["model_path"])
        self._folder.mkdir()
        shutil.copy(source / "config.json", self._folder)

    def push(self, weights: Weights, version: int) -> dict[str, Any]:
        """See ``Gather``."""
        start = time.perf_counter()
        held = {name: tensor.contiguous() for name, tensor in weights}
        save_file(held, self._folder / "model.safetensors", {"format": "pt"})
        sent = sum(tensor.nbytes for tensor in held.values())
        del held
        took = time.perf_counter() - start
        seconds = _paused(
            self._client, version, lambda: self._client.update_from_disk(self._folder)
        )
        return {"seconds": {"send": took, **seconds}, "bytes": (1 + self._tp) * sent}

    def close(self) -> None:
        """Remove the checkpoint."""
        shutil.rmtree(self._folder)
        self._client.close()


GATHERS: dict[str, Callable[[str, int, Path], Gather]] = {
    "gather, broadcast": ByBroadcast,
    "gather, tensors": ByTensor,
    "gather, disk": ByDisk,
}


def _paused(client: RolloutClient, version: int, load: Callable[[], None]) -> dict[str, float]:
    """Seconds of loading into a paused server, and of the whole pause."""
    start = time.perf_counter()
    client.pause("retract")
    began = time.perf_counter()
    load()
    loaded = time.perf_counter() - began
    client.set_version(version)
    client.continue_()
    return {"load": loaded, "paused": time.perf_counter() - start}


def _buckets(weights: Weights) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in shared memory, at most ``_BUCKET`` bytes at once, or one that is larger."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > _BUCKET:
            yield held
            held, size = [], 0
        held.append((name, tensor.detach().clone().share_memory_()))
        size += tensor.nbytes
    if held:
        yield held
