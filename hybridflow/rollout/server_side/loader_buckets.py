"""Loading streams of buckets into a server's live parameters, each verified first."""

from __future__ import annotations

import hashlib
from math import prod
from typing import Any

from torch import Tensor

if __package__:
    from hybridflow.rollout.server_side.loader_job import Job
    from hybridflow.rollout.server_side.shared_memory_channel import (
        SharedMemoryChannel,
        open_channel,
    )
    from hybridflow.rollout.server_side.sync_files import LoadFault, refuse
else:  # inside SGLang, this folder is on the path and the project is not
    from loader_job import Job
    from shared_memory_channel import SharedMemoryChannel, open_channel
    from sync_files import LoadFault, refuse

_TRAILER = 32


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
    channels: list[SharedMemoryChannel] = []
    try:
        for stream in streams:
            channels.append(open_channel(stream, job.folder, job.control["deadline"]))
        job.timed("stream", lambda: _drain(job, streams, channels, targets))
    finally:
        for channel in channels:
            channel.close()


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
    channels: list[SharedMemoryChannel],
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
    digest.update(payload.numpy().data)
    if digest.digest() != bytes(trailer.numpy()):
        raise LoadFault(f"bucket {number} of stream {name} is not what its sender hashed.")
    return payload


def _apply(job: Job, targets: list[Tensor], entries: list, payload: Tensor) -> None:
    job.touch()
    for index, box, offset in entries:
        target = targets[index][tuple(slice(start, stop) for start, stop in box)]
        size = target.numel() * target.itemsize
        target.copy_(payload[offset : offset + size].view(target.dtype).view(target.shape))
        job.status["bytes"] += size
