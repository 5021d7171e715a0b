"""The two sides of a broadcast in one process, and what a test needs around them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hybridflow.weight_sync.broadcast import Broadcasted, BroadcastInbox, BroadcastOutbox
from hybridflow.weight_sync.pairs import Listener
from hybridflow.weight_sync.wiring import SyncSettings, Wiring
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard import Seat


def wiring(model: Path, tp: int, *, bucket: int = 30_000, seconds: float = 100.0) -> Wiring:
    """One trainer rank and one engine on this host."""
    here = Seat("here", None)
    sync = SyncSettings("broadcast", "bucketed", bucket, "retract", None, seconds, str(model))
    return Wiring(
        model_path=str(model),
        layout=ParallelLayout(),
        dtype="float32",
        tp=tp,
        ep=1,
        device="cpu",
        trainer=(here,),
        engines=((here,) * tp,),
        sync=sync,
    )


def weights(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The folder's tensors."""
    yield from load_file(model / "model.safetensors").items()


def config(model: Path) -> dict[str, Any]:
    """The folder's config.json."""
    return json.loads((model / "config.json").read_text())


def broadcast(
    client: Any, wired: Wiring, export: Callable[[], Any], version: int, folder: Path
) -> tuple[BroadcastInbox, Broadcasted | None]:
    """A paused server takes what rank 0 exports; the first side that fails raises."""
    inbox = BroadcastInbox(wired, 0, folder, Listener())
    outbox = BroadcastOutbox(wired, 0, export)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(inbox.load, client, version)
        try:
            sent = outbox.send({0: inbox.open(version)}, version)
        finally:
            inbox.close()
        loading.result()
    return inbox, sent
