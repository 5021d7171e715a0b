"""The trainer of benchmarks/weight_sync.py: Megatron ranks in processes of their own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import tempfile
import traceback
import zlib
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.weight_sync_gather import GATHERS, Gather
from hybridflow import owned
from hybridflow.megatron.config import EngineConfig
from hybridflow.megatron.engine import Engine
from hybridflow.weight_sync.checksum import server_checksum
from hybridflow.weight_sync.folders import memory, own_folder
from hybridflow.weight_sync.transports import Outbox, make_outbox
from hybridflow.weight_sync.wiring import Wiring
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.live import load_hf_config

_DEADLINE = timedelta(minutes=5)
STEP = 1e-6
"""Each version differs from the last by this in every element, as after a step of AdamW."""
_CHANGED = 1 << 16
"""Elements that are changed at once: this memory is not the publication's, which is watched."""


class Trainer:
    """The ranks, from outside.

    Args:
        model: HuggingFace folder.
        logs: for what libraries print.
    """

    def __init__(self, model: Path, layout: ParallelLayout, logs: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pipes: list[Connection] = []
        self._ranks = []
        for rank in range(layout.world):
            ours, theirs = context.Pipe()
            others = (*self._pipes, ours)  # a rank that kept these open would not see them end
            log = logs / f"rank{rank}.log"
            given = (theirs, others, self._folder.name, rank, model, layout, log)
            process = context.Process(target=_serve, args=given)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._ranks.append(process)
        self.folders = [Path(folder) for folder in self._answers("start")]

    @property
    def pids(self) -> list[int]:
        """Of the ranks."""
        return [process.pid for process in self._ranks if process.pid is not None]

    def run(self, job: str, *arguments: Any) -> list[Any]:
        """A method of ``_Rank`` on every rank at once; the results in rank order.

        Raises:
            RuntimeError: a rank failed, with its traceback.
        """
        for pipe in self._pipes:
            pipe.send((job, arguments))
        return self._answers(job)

    def stop(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._ranks:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _answers(self, job: str) -> list[Any]:
        found = []
        for rank, pipe in enumerate(self._pipes):
            try:
                ok, value = pipe.recv()
            except EOFError:
                raise RuntimeError(f"{job}: trainer rank {rank} died") from None
            if not ok:
                raise RuntimeError(f"{job}: trainer rank {rank} failed:\n{value}")
            found.append(value)
        return found


def _serve(
    pipe: Connection,
    others: Sequence[Connection],
    folder: str,
    number: int,
    model: Path,
    layout: ParallelLayout,
    log: Path,
) -> None:
    for other in others:
        other.close()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    rank = None
    job, arguments = "folder", ()
    try:
        while True:
            try:
                rank = rank or _Rank(folder, number, model, layout)
                answer = (True, getattr(rank, job)(*arguments))
            except Exception:  # noqa: BLE001  (it goes to the parent, which raises)
                answer = (False, traceback.format_exc())
            pipe.send(answer)
            job, arguments = pipe.recv()
    except EOFError:
        sys.stderr.write("the benchmark has ended\n")
    finally:
        if rank is not None:
            rank.close()
    os._exit(0)  # gloo's threads may wait for ranks that have gone


class _Rank:
    """One trainer rank: a live model, and what it sends with."""

    def __init__(self, folder: str, rank: int, model: Path, layout: ParallelLayout) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=layout.world,
            timeout=_DEADLINE,
        )
        self._rank, self._config = rank, load_hf_config(model)
        self._engine = Engine(EngineConfig(str(model), layout))
        self._local = own_folder(memory())
        self._outbox: Outbox | None = None
        self._gather: Gather | None = None
        self._sent = 0
        self._count_sends()

    def folder(self) -> str:
        """Of this rank, in shared memory."""
        return str(self._local)

    def connect(self, wiring: Wiring) -> None:
        """Make ready for a transport."""
        give_back()
        self._outbox = make_outbox(wiring, self._rank, self._engine, self._local)

    def send(self, endpoints: Any, version: int) -> Any:
        """This rank's part of a version; what it says it sent."""
        assert self._outbox is not None
        return self._outbox.send(endpoints, version)

    def connect_gather(self, way: str, url: str, tp: int) -> None:
        """Make ready to gather and push as others do."""
        give_back()
        self._gather = GATHERS[way](url, tp, self._local) if self._rank == 0 else None

    def gather(self, version: int) -> dict[str, Any] | None:
        """Gather and push; rank 0 says what it took."""
        weights = self._engine.export_weights()
        if self._gather is None:
            for _ in weights:
                raise AssertionError("only rank 0 receives exported weights")
            return None
        return self._gather.push(weights, version)

    def disconnect(self) -> None:
        """Give everything back."""
        for held in (self._outbox, self._gather):
            if held is not None:
                held.close()
        self._outbox = self._gather = None
        give_back()

    def change(self, version: int) -> None:
        """Another version of the weights, the same on every rank that holds them."""
        for index, tensor in self._engine.local_weights().items():
            seed = zlib.crc32(f"{index} {version}".encode())
            generator = torch.Generator().manual_seed(seed)
            for part in tensor.detach().view(-1).split(_CHANGED):
                signs = torch.randint(0, 2, part.shape, generator=generator, dtype=torch.int8)
                part.add_(signs.to(part.dtype).mul_(2).sub_(1), alpha=STEP)

    def checksum(self, tp: int) -> str | None:
        """What a server of these weights must show; rank 0 knows."""
        weights = self._engine.export_weights()
        if self._rank != 0:
            for _ in weights:
                raise AssertionError("only rank 0 receives exported weights")
            return None
        return server_checksum(weights, self._config, tp)

    def gathered_bytes(self) -> int:
        """Sent to rank 0 since the last call."""
        sent, self._sent = self._sent, 0
        return sent

    def close(self) -> None:
        """Remove what was written."""
        self.disconnect()
        owned.remove(self._local)

    def _count_sends(self) -> None:
        send = dist.send

        def counted(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            self._sent += tensor.nbytes
            return send(tensor, *arguments, **named)

        dist.send = counted


def give_back() -> None:
    """Freed memory to the kernel, so that what one way took is not there for the next."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
