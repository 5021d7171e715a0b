"""Loads published weights inside a rollout server's process, straight into its live parameters.

SGLang imports it by name (`--custom-weight-loader hybridflow_loader.load`) and calls it for an
/update_weights_from_tensor request whose one tensor, "control", holds JSON; the local engine calls
`serve`. It stands alone: torch and the standard library, nothing of this project's.

An exception here would end the server. So nothing is ever raised: each rank writes a status file
into the run's sync folder, and whoever sent the request reads those. Every name, type and size is
checked before the first byte is copied; "touched" tells whether parameters may have changed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

if __package__:
    from hybridflow.rollout.server_side.loader_buckets import bucketed
    from hybridflow.rollout.server_side.loader_job import Job
    from hybridflow.rollout.server_side.loader_standby import standby
    from hybridflow.rollout.server_side.sync_files import LoadFault, sync_folder
else:  # inside SGLang, this folder is on the path and the project is not
    from loader_buckets import bucketed
    from loader_job import Job
    from loader_standby import standby
    from sync_files import LoadFault, sync_folder


_HASHED = 32 << 20
"""Bytes that are made contiguous at once to be hashed."""


def load(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """SGLang's entry: one tensor, "control", whose bytes are the request's JSON."""
    try:
        text = bytes(named_tensors[0][1].cpu().numpy())
        from sglang.srt.runtime_context import get_parallel  # type: ignore[import-not-found]

        parameters, rank = dict(model.named_parameters()), get_parallel().tp_rank
    except BaseException as error:  # noqa: BLE001 - raising would end the server
        _complain(f"a request that cannot be read: {error!r}")
        return
    # Models with latent attention keep tensors that SGLang derived from their parameters.
    serve(parameters, rank, text, getattr(model, "post_load_weights", None))


def serve(
    parameters: Mapping[str, Tensor],
    rank: int,
    text: str | bytes,
    derive: Callable[[], object] | None = None,
) -> None:
    """Do what the control JSON asks of this rank's live parameters, and write its status.

    `derive` makes anew what follows from them; called when they were loaded.
    """
    job = None
    try:
        folder = sync_folder()
        control = json.loads(text)
        job = Job(parameters, rank, control, folder)
        job.run(_OPERATIONS)
        if derive is not None and job.status["touched"]:
            job.timed("derive", derive)
    except BaseException as error:  # noqa: BLE001 - raising would end the server
        fault = str(error) if isinstance(error, LoadFault) else repr(error)
        if job is None:
            _complain(f"rank {rank}: a request without a place for its status: {fault}")
            return
        job.status |= {"ok": False, "error": fault}
    try:
        job.write_status()
    except BaseException as error:  # noqa: BLE001 - raising would end the server
        _complain(f"rank {rank}: the status could not be written: {error!r}")


def _digest(job: Job) -> None:
    """16 hex digits of SHA-256 over each live parameter's bytes, row-major."""

    def hashed() -> dict[str, str]:
        found = {}
        for name, tensor in job.parameters.items():
            flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            found[name] = hashlib.sha256(flat.numpy().data).hexdigest()[:16]
        return found

    job.status["digests"] = job.timed("digest", hashed)


def _boxes(job: Job) -> None:
    """SHA-256 over the elements of each list of boxes of live parameters, in their order."""
    targets = job.targets()

    def hashed(boxes: list) -> str:
        digest = hashlib.sha256()
        for index, box in boxes:
            part = targets[index][tuple(slice(start, stop) for start, stop in box)]
            rows = max(1, _HASHED // max(part[0].numel() * part.itemsize, 1))
            for at in range(0, len(part), rows):
                flat = part[at : at + rows].cpu().contiguous().reshape(-1).view(torch.uint8)
                digest.update(flat.numpy().data)
        return digest.hexdigest()

    groups = job.control["boxes"]
    found = job.timed("digest", lambda: {name: hashed(boxes) for name, boxes in groups.items()})
    job.status["digests"] = found


def _names(job: Job) -> None:
    """Name, dtype and shape of each live parameter."""
    job.status["parameters"] = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in job.parameters.items()
    ]


_OPERATIONS: dict[str, Callable[[Job], None]] = {
    "standby": standby,
    "bucketed": bucketed,
    "boxes": _boxes,
    "digest": _digest,
    "names": _names,
}


def _complain(text: str) -> None:
    sys.stderr.write(f"hybridflow_loader: {text}\n")
    sys.stderr.flush()
