"""Runs a function on real gloo ranks, forked from a parent that has imported torch and Megatron.

``run_ranks(work, 2, ...)`` forks two processes, joins them in a process group and returns what
``work(...)`` returned on each, in rank order. A rank that fails, dies or hangs is an error that
shows the first cause and, for a hang, where each rank stood.
"""

import datetime
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

# A peer's failure shows as one of these on the others: consequences, not causes.
_CONSEQUENCES = ("onnection", "imed out", "timeout", "Broken pipe", "peer")
# How long the other ranks may run on once one has failed.
_GRACE_SECONDS = 5.0


class RanksFailed(AssertionError):
    """A rank failed; the text shows the first cause, then the others."""


@dataclass(frozen=True)
class _Outcome:
    ok: bool
    value: Any  # the result, or the error's traceback as text
    error: str = ""


def run_ranks(
    work: Callable[..., Any], world: int, *args: Any, timeout: float = 120, **kwargs: Any
) -> list[Any]:
    """Run ``work(*args, **kwargs)`` on ``world`` ranks; its results in rank order.

    ``work`` runs after ``torch.distributed.init_process_group`` with gloo and may ask
    ``torch.distributed`` for its rank. Results are pickled.

    Raises:
        RanksFailed: when a rank raises, dies, or has not finished after ``timeout`` seconds.
    """
    _import_once()
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        processes = {}
        for rank in range(world):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                _child(work, rank, world, Path(folder), timeout, args, kwargs)
            processes[rank] = pid
        try:
            hung = _wait(processes, Path(folder), timeout)
        finally:
            _kill(processes)
        return _results(world, Path(folder), hung, timeout)


def _import_once() -> None:
    """Import what every rank needs here, once; a fork shares it."""
    torch.set_num_threads(1)
    from megatron_bridge.runtime import device

    device.prepare()
    for module in ("models.gpt", "optimizer", "pipeline_parallel", "distributed"):
        importlib.import_module(f"megatron.core.{module}")


def _child(
    work: Callable[..., Any],
    rank: int,
    world: int,
    folder: Path,
    timeout: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> NoReturn:
    """The whole life of one rank; never returns into the test runner."""
    try:
        stacks = open(folder / f"stack{rank}", "w")  # noqa: SIM115 (faulthandler keeps it)
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        outcome = _work(work, rank, world, folder, timeout, args, kwargs)
        part = folder / f"part{rank}"
        part.write_bytes(pickle.dumps(outcome))
        part.rename(folder / f"outcome{rank}")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _work(
    work: Callable[..., Any],
    rank: int,
    world: int,
    folder: Path,
    timeout: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Outcome:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=2 * timeout),
        )
        value = work(*args, **kwargs)
        pickle.dumps(value)
        # A rank that leaves early breaks its peers' connections.
        dist.barrier()
        return _Outcome(True, value)
    except BaseException as error:  # noqa: BLE001 (it goes to the parent, which raises)
        return _Outcome(False, traceback.format_exc(), f"{type(error).__name__}: {error}")


def _wait(processes: dict[int, int], folder: Path, timeout: float) -> set[int]:
    """Wait for the ranks; those that never finished, after writing down where they stand."""
    deadline = time.monotonic() + timeout
    running = dict(processes)
    failed_at = None
    while running and time.monotonic() < deadline:
        for rank, pid in list(running.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del running[rank]
                processes.pop(rank)
                if failed_at is None and _failed(rank, folder):
                    failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + _GRACE_SECONDS:
            break
        time.sleep(0.01)
    for pid in running.values():
        os.kill(pid, signal.SIGUSR1)
    if running:
        time.sleep(0.5)
    return set(running)


def _failed(rank: int, folder: Path) -> bool:
    outcome = _outcome(rank, folder)
    return outcome is None or not outcome.ok


def _outcome(rank: int, folder: Path) -> _Outcome | None:
    path = folder / f"outcome{rank}"
    return pickle.loads(path.read_bytes()) if path.exists() else None  # noqa: S301 (our own)


def _kill(processes: dict[int, int]) -> None:
    for pid in processes.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _results(world: int, folder: Path, hung: set[int], timeout: float) -> list[Any]:
    """The ranks' results, or the error that tells what went wrong."""
    outcomes = [_outcome(rank, folder) for rank in range(world)]
    if all(outcome is not None and outcome.ok for outcome in outcomes):
        return [outcome.value for outcome in outcomes if outcome is not None]
    failures = [
        (_order(outcome, rank in hung), rank, _tell(outcome, rank, rank in hung, folder, timeout))
        for rank, outcome in enumerate(outcomes)
        if outcome is None or not outcome.ok
    ]
    raise RanksFailed("\n\n".join(text for _, _, text in sorted(failures)))


def _order(outcome: _Outcome | None, hung: bool) -> int:
    """Causes first: errors, then dead ranks, then hung ones, then consequences."""
    if outcome is None:
        return 2 if hung else 1
    return 3 if any(word in outcome.error for word in _CONSEQUENCES) else 0


def _tell(outcome: _Outcome | None, rank: int, hung: bool, folder: Path, timeout: float) -> str:
    if outcome is not None:
        return f"rank {rank} failed: {outcome.error}\n{outcome.value}"
    stack = (folder / f"stack{rank}").read_text() if (folder / f"stack{rank}").exists() else ""
    how = f"had not finished (deadline {timeout:g} s)" if hung else "died"
    return f"rank {rank} {how}; it stood at\n{stack}"
