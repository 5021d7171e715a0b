"""Times what several ranks do together: forked processes, joined by gloo."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.convert_memory import measuring

_DEADLINE = timedelta(minutes=5)
_WORDS = 4 * 1021
"""Elements that are summed up together: of an odd length, so that a moved row is noticed."""


@dataclass(frozen=True)
class Prepared:
    """What a rank does again and again, and what it then holds.

    Attributes:
        work: is timed.
        tensors: hold the result.
    """

    work: Callable[[], Any]
    tensors: list[Tensor]


def on_ranks(world: int, prepare: Callable[[], Prepared], repeats: int) -> dict[str, Any]:
    """Run ``prepare()`` on each rank, once, and what it gives ``repeats`` times.

    Returns:
        ``seconds`` of each time, from when all ranks began to when all had ended; ``cpu_seconds``
        of all ranks; ``peak_bytes`` beyond what the ranks held before, their models included;
        ``sums`` of each rank's result.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        pipes, ranks = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, folder, rank, world, prepare, repeats)
            process = context.Process(target=_rank, args=arguments, daemon=False)
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        try:
            found = [pipe.recv() for pipe in pipes]
        except EOFError:
            raise RuntimeError("a rank failed; its error is in the log") from None
        finally:
            for process in ranks:
                process.join()
    cpu = [sum(each) for each in zip(*(rank["cpu_seconds"] for rank in found), strict=True)]
    return found[0] | {"cpu_seconds": cpu, "sums": [rank["sum"] for rank in found]}


def _rank(
    connection: Any,
    folder: str,
    rank: int,
    world: int,
    prepare: Callable[[], Prepared],
    repeats: int,
) -> None:
    join(folder, rank, world)
    prepared = prepare()
    touch(prepared.tensors)
    dist.barrier()
    peak = 0
    if rank == 0:
        with measuring(os.getppid()) as measured:
            times = _repeat(prepared, repeats)
        peak = measured.peak_bytes
    else:
        times = _repeat(prepared, repeats)
    total = checksum(prepared.tensors)
    dist.barrier()
    connection.send({**times, "peak_bytes": peak, "sum": total})
    dist.destroy_process_group()


def join(folder: str, rank: int, world: int) -> None:
    """Become a rank; all meet in a folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=_DEADLINE,
    )


def touch(tensors: list[Tensor]) -> None:
    """Zeros: no page of the target is new when the clock runs."""
    for tensor in tensors:
        tensor.detach().zero_()


def _repeat(prepared: Prepared, repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"seconds": [], "cpu_seconds": []}
    for _ in range(repeats):
        dist.barrier()
        start, before = time.perf_counter(), time.process_time()
        prepared.work()
        times["cpu_seconds"].append(time.process_time() - before)
        dist.barrier()
        times["seconds"].append(time.perf_counter() - start)
    return times


def checksum(tensors: list[Tensor]) -> int:
    """A number that a changed or moved element changes, as good as always."""
    total = 0
    for place, tensor in enumerate(tensors, 1):
        words = tensor.detach().contiguous().view(-1).view(torch.int16)
        whole = len(words) - len(words) % _WORDS
        columns = words[:whole].view(torch.int64).view(-1, _WORDS // 4).sum(0)
        weights = torch.arange(1, len(columns) + 1)
        total += place * int((columns * weights).sum() + words[whole:].sum(dtype=torch.int64))
    return total % 2**61
