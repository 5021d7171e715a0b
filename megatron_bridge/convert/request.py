"""From what a user asks for to a conversion, and from its result to a closing line."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_bridge.convert.hosts import under_torchrun
from megatron_bridge.convert.huggingface_sink import HuggingFaceSink
from megatron_bridge.convert.job import Job, Limits, Result
from megatron_bridge.convert.kinds import Kind, kind_of
from megatron_bridge.convert.megatron_sink import MegatronSink, as_megatron
from megatron_bridge.convert.memory import Meter
from megatron_bridge.convert.run import convert
from megatron_bridge.convert.sink import Sink
from megatron_bridge.convert.sizes import show_binary, show_bytes
from megatron_bridge.convert.sources import Opened, open_checkpoint
from megatron_bridge.huggingface.write import SHARD_BYTES
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.source import Source


@dataclass(frozen=True)
class Request:
    """The arguments of `convert`; None where the user left one out."""

    source: Path
    destination: Path
    to: str | None
    parallel: str | None
    dtype: str | None
    memory: int
    workers: int
    shard_bytes: int | None
    adapter: Path | None
    config: Path | None
    resume: bool
    overwrite: bool


@dataclass(frozen=True)
class Summary:
    """A conversion that is done."""

    source: str
    kind: str
    result: Result

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"source": self.source, "kind": self.kind, **asdict(self.result)}

    def line(self) -> str:
        """For people."""
        done = self.result
        resumed = f", {show_bytes(done.resumed)} of it by earlier runs" if done.resumed else ""
        return (
            f"{done.destination}: {self.kind}, {done.tensors} tensors, {show_bytes(done.bytes)}"
            f"{resumed}; {done.seconds:.1f} s, {done.speed / 1e9:.2f} GB/s, peak memory "
            f"{show_binary(done.peak)} of {show_binary(done.memory)}"
        )


def default_workers(most: int) -> int:
    """One a core that this rank may use."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else 1
    return max(1, min(most, len(os.sched_getaffinity(0)) // ranks))


def run(request: Request, meter: Meter) -> Summary | None:
    """Convert; on a torchrun rank other than 0 returns None.

    Raises:
        ValueError: a mistake of the user.
        OSError: no space, no permission.
        RuntimeError: a worker was killed, another rank failed.
    """
    _check(request)
    torch.set_num_threads(1)
    to = _target(request)
    opened = open_checkpoint(
        request.source,
        config=request.config,
        adapter=request.adapter,
        dtype=None if request.dtype is None else getattr(torch, request.dtype),
        needs_table=to is Kind.MEGATRON,
    )
    job = _job(request, opened, to)
    limits = Limits(request.memory, request.workers, request.resume, request.overwrite)
    result = convert(job, _absolute(request.destination), limits, meter)
    if under_torchrun() and os.environ["RANK"] != "0":
        return None
    return Summary(str(request.source), to, result)


def _check(request: Request) -> None:
    if request.workers < 1:
        raise ValueError(f"--workers is at least 1, not {request.workers}")
    source, destination = request.source.resolve(), _absolute(request.destination)
    if source == destination or source in destination.parents or destination in source.parents:
        raise ValueError(f"DST {destination} and SRC {source} must not contain each other")


def _absolute(destination: Path) -> Path:
    """DST itself may be absent, or a link that is to be replaced, not followed."""
    if destination.name in ("", ".."):
        return destination.resolve()
    return destination.parent.resolve() / destination.name


def _target(request: Request) -> Kind:
    kind = kind_of(request.source)
    other = Kind.MEGATRON if kind is Kind.HUGGINGFACE else Kind.HUGGINGFACE
    to = Kind(request.to) if request.to else other
    if to is Kind.HUGGINGFACE and request.parallel is not None:
        raise ValueError("--parallel is for Megatron results; a HuggingFace folder has no layout")
    if to is Kind.MEGATRON and request.shard_bytes is not None:
        raise ValueError("--shard-size is for HuggingFace results; see --parallel")
    return to


def _job(request: Request, opened: Opened, to: Kind) -> Job:
    source, sink = (_to_megatron if to is Kind.MEGATRON else _to_huggingface)(request, opened)
    options = {
        "SRC": str(request.source.resolve()),
        "--to": str(to),
        "--parallel": request.parallel,
        "--dtype": request.dtype,
        "--shard-size": request.shard_bytes,
        "--adapter": _told(request.adapter),
        "--config": _told(request.config),
    }
    return Job(source, sink, opened.files, options, opened.entries)


def _told(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


def _to_megatron(request: Request, opened: Opened) -> tuple[Source, Sink]:
    layout = None if request.parallel is None else ParallelLayout.parse(request.parallel)
    source = as_megatron(opened, layout)
    return source, MegatronSink(source, opened.config, opened.companions, layout)


def _to_huggingface(request: Request, opened: Opened) -> tuple[Source, Sink]:
    shard_bytes = request.shard_bytes or SHARD_BYTES
    sink = HuggingFaceSink(opened.source, opened.config, opened.companions, shard_bytes)
    return opened.source, sink
