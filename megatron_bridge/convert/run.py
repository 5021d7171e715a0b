"""One conversion from start to end: plan, workers, journal, rename."""

import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_bridge.convert import journal
from megatron_bridge.convert.hosts import Alone, Hosts, Torchrun, under_torchrun
from megatron_bridge.convert.job import Job, Limits, Result
from megatron_bridge.convert.journal import Journal, Place
from megatron_bridge.convert.memory import Budget, Meter
from megatron_bridge.convert.partial import (
    Partial,
    Stamp,
    changed_files,
    check_resumable,
    file_stamps,
    sync_files,
)
from megatron_bridge.convert.plan import Unit, fingerprint, make_units
from megatron_bridge.convert.progress import Progress
from megatron_bridge.convert.signals import held
from megatron_bridge.convert.sizes import show_bytes
from megatron_bridge.convert.workers import Workers

_BATCH_SIZE = 4
"""Size of a batch in units of full size: small units are not worth a message each."""
_BATCH_UNITS = 256
_FILES_AT_ONCE = 8
"""Files that are written at one time; a constant, because all ranks must cut the work alike."""
_POLL_SECONDS = 0.02
_ENDED = "ended before"


def convert(job: Job, destination: Path, limits: Limits, meter: Meter) -> Result:
    """Run a conversion; under torchrun every rank calls it.

    Forks: call it while the process has one thread.

    Args:
        job: source and sink.
        destination: is complete afterwards, or as it was.
        limits: memory, workers and what may be replaced.
        meter: made right after the imports.

    Raises:
        ValueError: a mistake of the user: a destination that exists, too little memory, a source
            that changed ...
        OSError: no space, no permission.
        RuntimeError: a worker was killed, another rank failed.
    """
    hosts: Hosts = Torchrun() if under_torchrun() else Alone()
    partial = Partial(destination)
    try:
        return _Conversion(job, partial, limits, meter, hosts).run()
    except BaseException as error:
        hosts.fail(str(error) or type(error).__name__)
        raise
    finally:
        if hosts.rank == 0:
            partial.discard_if_empty()


class _Conversion:
    """The state of one run on one rank."""

    def __init__(
        self, job: Job, partial: Partial, limits: Limits, meter: Meter, hosts: Hosts
    ) -> None:
        self.start = time.monotonic()
        self.job, self.partial, self.limits = job, partial, limits
        self.meter, self.hosts = meter, hosts
        self.unit_bytes = self._unit_bytes()
        self.units = make_units(job.sink.items, self.unit_bytes)
        self.total = sum(unit.bytes for unit in self.units)
        self.stamp = self._stamp()
        self.ended = False

    def _unit_bytes(self) -> int:
        """From the bound; a resumed conversion keeps its units, which must fit the bound."""
        memory = self.limits.memory // self.hosts.local_world
        items = self.job.sink.items
        rectangles = sum(len(item.rectangles) for item in items)
        planned = sum(item.working_bytes for item in items)
        budget = Budget(memory, self.limits.workers, self.job.tensors, rectangles, planned)
        fits = budget.unit_bytes()
        if not (self.limits.resume and self.partial.exists):
            return fits
        kept = self.partial.stamp()["unit_bytes"]
        if kept > fits:
            least = budget.needed(kept) * self.hosts.local_world
            raise ValueError(
                f"this conversion was begun in units of {show_bytes(kept)}: resume it with fewer "
                f"--workers, or with --memory {-(-least // 2**20)}MiB"
            )
        return kept

    def _stamp(self) -> Stamp:
        return {
            "options": self.job.options,
            "files": file_stamps(self.job.files()),
            "units": fingerprint(self.units),
            "unit_bytes": self.unit_bytes,
        }

    def run(self) -> Result:
        if self.hosts.rank == 0:
            self._claim()
        workers: Workers | None = None
        try:
            with held():
                workers = self._fork()
            self.hosts.connect()
            if self.hosts.rank == 0:
                self._begin()
            if not self._has_work():
                return self._result(self.total)
            done = self._join()
            resumed = sum(self.units[index].bytes for index in done)
            self._convert(workers, done, resumed)
        finally:
            if workers is not None:
                workers.stop()
        self.hosts.meet("converted", self.total)
        if self.hosts.rank == 0:
            self._finish()
        self.hosts.meet("finished", self.total)
        return self._result(resumed)

    def _fork(self) -> Workers:
        return Workers(self.limits.workers, self.units, self.job.source, self._open_writer)

    def _open_writer(self, run: int, worker: int) -> Any:
        return self.job.sink.open(self.partial.result, run, f"{self.hosts.rank}_{worker}")

    def _claim(self) -> None:
        """Refuse what cannot go well, before any process starts."""
        if not (self.limits.resume and self.partial.ended):
            self.partial.check_destination(self.limits.overwrite)
        self.partial.lock()
        if self.limits.resume and self.partial.ended:
            check_resumable(self.stamp, self.partial.stamp(), self.partial.folder)
            self.ended = True
            return
        self.partial.check_destination(self.limits.overwrite)  # the lock's holder may have made it
        if not self.limits.resume:
            self.partial.check_new()
        elif self.partial.exists:
            check_resumable(self.stamp, self.partial.stamp(), self.partial.folder)

    def _begin(self) -> None:
        if self.ended:
            self.partial.discard()
            self.hosts.tell("begun", _ENDED)
            return
        if not self.partial.exists:
            self.partial.begin()
            self._check_space(self.total)
            self.job.sink.prepare(self.partial.result)
            self.partial.commit_begin(self.stamp)
        self.hosts.tell("begun", self.stamp["units"])

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.partial.folder).free
        if needed > free:
            raise OSError(
                f"{self.partial.destination.parent} has {show_bytes(free)} free, the conversion "
                f"needs {show_bytes(needed)}"
            )

    def _has_work(self) -> bool:
        """False when an earlier run had put the result in place."""
        begun = self.hosts.ask("begun", "rank 0 to lay out the result")
        if begun not in (self.stamp["units"], _ENDED):
            raise ValueError("ranks see different sources or options; give all the same")
        return begun != _ENDED

    def _join(self) -> dict[int, Place]:
        """Agree on what earlier runs did and open this run's journal."""
        self.hosts.tell(f"boot/{self.hosts.rank}", journal.boot_id())
        boots = {
            self.hosts.ask(f"boot/{rank}", f"rank {rank} to start")
            for rank in range(self.hosts.world)
        }
        done, runs = journal.read_journals(self.partial.folder, boots)
        self.run_number = runs
        self.hosts.meet("read the journals", 0)
        return done

    def _convert(self, workers: Workers, done: dict[int, Place], resumed: int) -> None:
        path = self.partial.folder / f"journal.{self.hosts.rank}.jsonl"
        notes = Journal(path, self.run_number)
        shown = self.limits.shown and self.hosts.rank == 0
        try:
            with Progress(self.total, resumed, shown=shown) as progress:
                self._hand_out(workers, notes, progress, self._batches(done))
        finally:
            notes.close()

    def _batches(self, done: dict[int, Place]) -> list[list[int]]:
        """What is left, in portions worth a message; the same on every rank."""
        left: dict[int, list[int]] = {}
        for index, unit in enumerate(self.units):
            if index not in done:
                left.setdefault(unit.item.file, []).append(index)
        most = _BATCH_SIZE * self.unit_bytes
        return list(_in_turns([list(_portions(self.units, file, most)) for file in left.values()]))

    def _hand_out(
        self, workers: Workers, notes: Journal, progress: Progress, batches: list[list[int]]
    ) -> None:
        own, left = 0, True
        while left or workers.busy:
            for worker in workers.idle() if left else ():
                number = self.hosts.take()
                left = number < len(batches)
                if not left:
                    break
                workers.send(worker, self.run_number, batches[number])
            for report in workers.poll(_POLL_SECONDS) if workers.busy else ():
                notes.done(report.worker, report.places)
                if report.synced:
                    notes.synced(report.worker)
                own += sum(self.units[index].bytes for index, _ in report.places)
                self.meter.note(report.worker, report.anonymous)
            self._check_memory(workers)
            progress.advance(own + self.hosts.beat(own))

    def _check_memory(self, workers: Workers) -> None:
        """Rather stop than use more than was allowed."""
        now, bound = self.meter.sample(workers.pids), self.limits.memory // self.hosts.local_world
        if now > bound:
            raise RuntimeError(
                f"the processes hold {show_bytes(now)}, more than the {show_bytes(bound)} that "
                "--memory allows and more than the bridge's own model of it; resume with more"
            )

    def _finish(self) -> None:
        """All units are written: make the result whole and put it in place."""
        changed = changed_files(self.stamp["files"], file_stamps(self.job.files()))
        if changed:
            raise ValueError(
                f"{changed[0]} changed during the conversion, so its result is not put in place; "
                f"remove {self.partial.folder} and convert again"
            )
        boots = {self.hosts.ask(f"boot/{rank}", f"rank {rank}") for rank in range(self.hosts.world)}
        done, _ = journal.read_journals(self.partial.folder, boots)
        assert len(done) == len(self.units), (len(done), len(self.units))
        places = [(unit, done[index]) for index, unit in enumerate(self.units)]
        self.job.sink.finish(self.partial.result, places)
        sync_files(self.partial.result)
        self.meter.sample([])
        self.partial.put_in_place(self.limits.overwrite)

    def _result(self, resumed: int) -> Result:
        return Result(
            destination=str(self.partial.destination),
            tensors=len(self.job.sink.items),
            bytes=self.total,
            seconds=time.monotonic() - self.start,
            resumed=resumed,
            peak=self.meter.peak,
            memory=self.limits.memory,
        )


def _portions(units: list[Unit], indices: list[int], most: int) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for index in indices:
        batch.append(index)
        size += units[index].bytes
        if size >= most or len(batch) == _BATCH_UNITS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _in_turns(files: list[list[list[int]]]) -> Iterator[list[int]]:
    """Batches of one file and another in turn: a file takes the writes of one process at a time."""
    for start in range(0, len(files), _FILES_AT_ONCE):
        for turn in itertools.zip_longest(*files[start : start + _FILES_AT_ONCE]):
            yield from (batch for batch in turn if batch is not None)
