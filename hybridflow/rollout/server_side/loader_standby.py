"""Loading a whole slot into a server's live parameters."""

from __future__ import annotations

import os

import torch
from torch import Tensor

if __package__:
    from hybridflow.rollout.server_side.loader_job import Job
    from hybridflow.rollout.server_side.sync_files import LoadFault, open_inside, refuse
else:  # inside SGLang, this folder is on the path and the project is not
    from loader_job import Job
    from sync_files import LoadFault, open_inside, refuse

_STAGING = 64 << 20


def standby(job: Job) -> None:
    """Copy a whole slot into the parameters."""
    size = job.control["bytes"]
    targets = job.targets()
    offsets = [entry[3] for entry in job.control["parameters"]]
    ends = zip(job.control["parameters"], targets, offsets, strict=True)
    outside = [
        f"{entry[0]} lies outside the slot"
        for entry, tensor, offset in ends
        if not 0 <= offset <= size - tensor.nbytes
    ]
    refuse("the request does not fit its slot", outside)
    descriptor = job.timed("open", lambda: open_inside(job.folder, job.control["slot"], size))
    try:
        job.timed("copy", lambda: _copy_all(job, descriptor, targets, offsets))
    finally:
        os.close(descriptor)


def _copy_all(job: Job, descriptor: int, targets: list[Tensor], offsets: list[int]) -> None:
    """Read, not map: a slot that someone cuts short meanwhile is an error and not a SIGBUS."""
    staging: Tensor | None = None
    for tensor, offset in zip(targets, offsets, strict=True):
        flat = tensor.reshape(-1).view(torch.uint8)
        job.touch()
        if not flat.is_cuda:
            read_into(descriptor, flat, offset)
        else:
            if staging is None:
                staging = torch.empty(_STAGING, dtype=torch.uint8, pin_memory=True)
            for at in range(0, len(flat), _STAGING):
                part = staging[: min(_STAGING, len(flat) - at)]
                read_into(descriptor, part, offset + at)
                flat[at : at + len(part)].copy_(part)
        job.status["bytes"] += len(flat)


def read_into(descriptor: int, target: Tensor, offset: int) -> None:
    """Fill `target`, uint8 on the CPU, from `offset` on."""
    view = target.numpy().data
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise LoadFault(f"the slot ended at byte {offset} while it was copied.")
        view, offset = view[count:], offset + count
