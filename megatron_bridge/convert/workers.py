"""Worker processes: each reads and writes units until there are none left.

Workers are forked once the plan stands, so that they share it; they are processes even when there
is only one, so that the parent outlives what kills a worker and can say it in one line.
"""

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from megatron_bridge.convert.journal import Place
from megatron_bridge.convert.memory import anonymous_bytes
from megatron_bridge.convert.plan import Unit
from megatron_bridge.convert.signals import held
from megatron_bridge.convert.sink import Writer
from megatron_bridge.prefetch import lost, prefetch
from megatron_bridge.source import Source

STALL_SECONDS = 600.0
"""Longest time for a batch of units: beyond it the file system hangs."""
SYNC_SECONDS = 30.0
"""How often a worker brings its files to the disk."""
_STOP_SECONDS = 10.0
_SIGNAL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**30


class WorkerDied(RuntimeError):
    """A worker ended without an error of its own."""


@dataclass
class Done:
    """A worker's report on a batch.

    Attributes:
        worker: its number.
        places: units (indices) with their places.
        synced: everything that it wrote so far is on the disk.
        anonymous: its largest anonymous resident memory so far, bytes.
    """

    worker: int
    places: list[tuple[int, Place]]
    synced: bool
    anonymous: int


@dataclass
class _Task:
    """What a worker does with a unit."""

    units: Sequence[Unit]
    source: Source
    writer: Writer
    anonymous: int = 0
    synced: float = field(default_factory=time.monotonic)

    def run(self, batch: list[int]) -> tuple[list[tuple[int, Place]], bool]:
        places = [(index, self._convert(self.units[index])) for index in batch]
        synced = time.monotonic() - self.synced > SYNC_SECONDS
        if synced:
            self.writer.sync()
            self.synced = time.monotonic()
        return places, synced

    def _convert(self, unit: Unit) -> Place:
        tensor = self.source.read(unit.item.name, unit.ranges)
        shape = tuple(high - low for low, high in unit.ranges)
        assert tuple(tensor.shape) == shape, (unit, tensor.shape)
        assert tensor.dtype == unit.item.dtype, (unit, tensor.dtype)
        self.anonymous = max(self.anonymous, anonymous_bytes())
        try:
            return self.writer.write(unit, tensor)
        except (OSError, ValueError) as error:
            if prefetch(tensor):
                raise
            # What is written may be a view of the source's file: then it was reading that failed.
            raise lost(unit.item.name) from error


@dataclass
class _Worker:
    number: int
    process: Any
    connection: Connection
    batch: list[int] = field(default_factory=list)
    since: float = 0.0


class Workers:
    """A group of worker processes on this host.

    Args:
        count: how many.
        units: all units; batches name them by index.
        source: read by every worker.
        open_writer: called in a worker with the run's and the worker's number, before its first
            batch.
    """

    def __init__(
        self,
        count: int,
        units: Sequence[Unit],
        source: Source,
        open_writer: Callable[[int, int], Writer],
    ) -> None:
        self._units = units
        self._workers: list[_Worker] = []
        context = multiprocessing.get_context("fork")
        try:
            for number in range(count):
                ours, theirs = context.Pipe()
                arguments = (theirs, units, source, open_writer, number, os.getpid())
                process = context.Process(target=_main, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(number, process, ours))
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [worker.process.pid for worker in self._workers]

    @property
    def busy(self) -> bool:
        """True while a batch is out."""
        return any(worker.batch for worker in self._workers)

    def idle(self) -> list[int]:
        """Numbers of the workers that wait for a batch."""
        return [worker.number for worker in self._workers if not worker.batch]

    def send(self, worker: int, run: int, batch: list[int]) -> None:
        """Give a batch to an idle worker."""
        held = self._workers[worker]
        assert not held.batch and batch
        held.batch, held.since = batch, time.monotonic()
        try:
            held.connection.send((run, batch))
        except OSError:
            raise self._death(held) from None

    def poll(self, seconds: float) -> list[Done]:
        """Batches that end within so many seconds (an empty list when none does).

        Raises:
            ValueError, OSError: what a worker ran into.
            WorkerDied: when one was killed or does not go on.
        """
        by_connection = {worker.connection: worker for worker in self._workers}
        done = []
        for connection in wait(list(by_connection), timeout=seconds):
            assert isinstance(connection, Connection)
            worker = by_connection[connection]
            done.append(self._receive(worker))
            worker.batch = []
        self._check_progress()
        return done

    def _receive(self, worker: _Worker) -> Done:
        try:
            answer = worker.connection.recv()
        except (EOFError, ConnectionError):
            raise self._death(worker) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _check_progress(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.batch and now - worker.since > STALL_SECONDS:
                raise WorkerDied(
                    f"worker {worker.number} has not finished {self._what(worker)} in "
                    f"{STALL_SECONDS:.0f} s; does the file system of source or destination hang?"
                )

    def _what(self, worker: _Worker) -> str:
        more = f" and {len(worker.batch) - 1} more" if len(worker.batch) > 1 else ""
        return f"'{self._units[worker.batch[0]].item.name}'{more}"

    def _death(self, worker: _Worker) -> WorkerDied:
        worker.process.join(_STOP_SECONDS)
        code = worker.process.exitcode
        if code == -signal.SIGTERM:
            time.sleep(_SIGNAL_SECONDS)  # sent to all of us: the parent's own is the better story
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return WorkerDied(
            f"worker {worker.number} {how} while it "
            f"{f'converted {self._what(worker)}' if worker.batch else 'waited for work'}"
            f"{_HINTS.get(code or 0, '')}"
        )

    def stop(self) -> None:
        """End all workers now, whatever they do."""
        with held():
            for worker in self._workers:
                worker.process.kill()
            for worker in self._workers:
                worker.process.join(_STOP_SECONDS)
                worker.connection.close()


_HINTS = {
    -signal.SIGBUS: ": a file of the source became shorter meanwhile, or its disk fails",
    -signal.SIGKILL: ": out of memory, or by hand",
}


def _main(
    connection: Connection,
    units: Sequence[Unit],
    source: Source,
    open_writer: Callable[[int, int], Writer],
    number: int,
    parent: int,
) -> None:
    """A worker's life; it ends with its parent."""
    _die_with_parent(parent)
    _keep_buffers()
    torch.set_num_threads(1)
    task: _Task | None = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        run, batch = message
        try:
            task = task or _Task(units, source, open_writer(run, number))
            places, synced = task.run(batch)
        except Exception as error:  # noqa: BLE001  (raised again in the parent)
            connection.send(_portable(error))
            return
        connection.send(Done(number, places, synced, task.anonymous))


def _keep_buffers() -> None:
    """Every unit takes the memory that the one before gave back: fresh pages cost more than copies.

    glibc's own way with large blocks is to return them to the system at once.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _die_with_parent(parent: int) -> None:
    """Signals of the terminal are the parent's business; its death, however it comes, is ours."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _portable(error: Exception) -> Exception:
    """What crosses the pipe: an error with a message for people, or ours with its traceback."""
    if isinstance(error, OSError):
        return (
            OSError(*error.args)
            if error.filename is None
            else type(error)(error.errno, error.strerror, error.filename)
        )
    if type(error) is ValueError:
        return ValueError(str(error))
    return RuntimeError("a worker failed:\n" + "".join(traceback.format_exception(error)))
