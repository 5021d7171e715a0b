"""Requests to the loader inside a server, and what its ranks answer."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import torch

from hybridflow.rollout.errors import LoadFailed, RolloutError
from hybridflow.rollout.protocol import LoaderStatus
from hybridflow.rollout.server_side.sync_files import LOADER


def request(controls: list[dict[str, Any]], flush_cache: bool) -> dict[str, Any]:
    """The request in SGLang's form; `control` says the same to the local engine, which unpickles
    nothing."""
    texts = [json.dumps(control) for control in controls]
    return {
        "serialized_named_tensors": [base64.b64encode(_pickled(text)).decode() for text in texts],
        "load_format": LOADER,
        "flush_cache": flush_cache,
        "control": texts,
    }


def _pickled(text: str) -> bytes:
    control = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return pickle.dumps([("control", control)], protocol=4)


def take_status(path: Path) -> LoaderStatus | None:
    """Read and remove one rank's status; None where there is none."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    path.unlink()
    return LoaderStatus.from_json(json.loads(text))


def all_loaded(
    url: str,
    controls: list[dict[str, Any]],
    statuses: list[LoaderStatus | None],
    refusal: RolloutError | None,
) -> list[LoaderStatus]:
    """The statuses, or LoadFailed with every rank's fault."""
    faults = [] if refusal is None else [str(refusal)]
    written = []
    for rank, (control, status) in enumerate(zip(controls, statuses, strict=True)):
        if status is None:
            faults.append(f"rank {rank} wrote no status; the server's log may say why")
            continue
        written.append(status)
        if status.nonce != control["nonce"]:
            faults.append(f"rank {rank} answered another request ({status.nonce})")
        elif not status.ok:
            faults.append(f"rank {rank}: {status.error}")
    touched = any(status is None or status.touched for status in statuses)
    if faults:
        raise LoadFailed(
            f"{url} did not load: {'; '.join(faults)}. Its parameters "
            + ("may be half changed." if touched else "have not changed."),
            written,
            touched,
        )
    return written
