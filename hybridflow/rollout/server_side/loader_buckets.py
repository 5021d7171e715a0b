"""Loading streams of buckets into a server's live parameters, each verified first."""

from __future__ import annotations

import hashlib
from math import prod
from typing import Any

from torch import Tensor

if __package__:
    from hybridflow.rollout.server_side.cuda_ipc_channel import (
        CudaIpcChannel,
        open_device_channel,
    )
    from hybridflow.rollout.server_side.loader_job import Job
    from hybridflow.rollout.server_side.shared_memory_channel import (
        SharedMemoryChannel,
        open_channel,
    )
    from hybridflow.rollout.server_side.sync_files import LoadFault, refuse
else:  # inside SGLang, this folder is on the path and the project is not
    from cuda_ipc_channel import CudaIpcChannel, open_device_channel
    from loader_job import Job
    from shared_memory_channel import SharedMemoryChannel, open_channel
    from sync_files import LoadFault, refuse

_TRAILER = 32
_HASHED = 32 << 20
"""Bytes of a bucket on a GPU that are brought to the host at once to be hashed."""
Channel = SharedMemoryChannel | CudaIpcChannel


def bucketed(job: Job) -> None:
    """Drain every stream in turn, verify each bucket, and copy it into the parameters."""
    targets = job.targets()
    streams = job.control["streams"]
    faults = [
        f"stream {place}, bucket {number}: {fault}"
        for place, stream in enumerate(streams)
        for number, bucket in enumerate(stream["buckets"])
        for fault in _bucket_faults(targets, bucket)
    ]
    refuse("the request's buckets do not fit the server's parameters", faults)
    channels: list[Channel] = []
    try:
        for stream in streams:
            channels.append(_open(job, stream, targets[0]))
        job.timed("stream", lambda: _drain(job, streams, channels, targets))
    finally:
        for channel in channels:
            channel.close()


def _open(job: Job, stream: dict[str, Any], target: Tensor) -> Channel:
    kind, seconds = stream["kind"], job.control["deadline"]
    if kind == "shared_memory":
        return open_channel(stream, job.folder, seconds)
    if kind == "cuda_ipc":
        return open_device_channel(stream, job.folder, seconds, target.device)
    raise LoadFault(f"stream {stream['name']} is of the unknown kind {kind!r}.")


def _bucket_faults(targets: list[Tensor], bucket: dict[str, Any]) -> list[str]:
    faults = []
    for index, box, offset in bucket["entries"]:
        if not 0 <= index < len(targets):
            faults.append(f"parameter {index} of {len(targets)}")
            continue
        shape, size = targets[index].shape, targets[index].itemsize
        fits = len(box) == len(shape) and all(
            0 <= start < stop <= length for (start, stop), length in zip(box, shape, strict=True)
        )
        count = prod(stop - start for start, stop in box) * size
        if not fits or offset % size or not 0 <= offset <= bucket["bytes"] - count:
            faults.append(f"box {box} at byte {offset} for shape {list(shape)}")
    return faults


def _drain(
    job: Job,
    streams: list[dict[str, Any]],
    channels: list[Channel],
    targets: list[Tensor],
) -> None:
    """Bucket n of every stream before bucket n + 1 of any: all senders stay busy."""
    for number in range(max((len(stream["buckets"]) for stream in streams), default=0)):
        for stream, channel in zip(streams, channels, strict=True):
            if number < len(stream["buckets"]):
                bucket = stream["buckets"][number]
                whole = channel.receive(number, bucket["bytes"] + _TRAILER)
                payload = verified(stream["name"], job.status["nonce"], number, whole)
                _apply(job, targets, bucket["entries"], payload)
                channel.release(number)


def verified(name: str, nonce: str, number: int, whole: Tensor) -> Tensor:
    """The bucket without its trailer, the SHA-256 over nonce, number and bytes.

    Raises:
        LoadFault: when the trailer is another: wrong bytes, another version's or place's.
    """
    payload, trailer = whole[:-_TRAILER], whole[-_TRAILER:]
    digest = hashlib.sha256(f"{nonce} {number} ".encode())
    for part in payload.split(_HASHED):
        digest.update(part.cpu().numpy().data)
    if digest.digest() != bytes(trailer.cpu().numpy()):
        raise LoadFault(f"bucket {number} of stream {name} is not what its sender hashed.")
    return payload


def _apply(job: Job, targets: list[Tensor], entries: list, payload: Tensor) -> None:
    job.touch()
    for index, box, offset in entries:
        target = targets[index][tuple(slice(start, stop) for start, stop in box)]
        size = target.numel() * target.itemsize
        target.copy_(payload[offset : offset + size].view(target.dtype).view(target.shape))
        job.status["bytes"] += size
