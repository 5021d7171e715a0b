"""Scores items in a process of their own, under deadlines that nothing can outlast."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hybridflow.rewards.items import RewardItem
from hybridflow.rewards.ledger import Ledger, ledger_memory
from hybridflow.rewards.outcomes import Failure, Outcome, RewardError
from hybridflow.rewards.process import ProcessEnded, ScoringProcess, StillLoading
from hybridflow.rewards.progress import Progress, Watch
from hybridflow.rewards.resolve import source_of
from hybridflow.rewards.wire import Load, Work

LOOK_SECONDS = 1.0
"""Between two looks at the memory of a process that is at work."""

_log = logging.getLogger(__name__)


class Scorer:
    """One reward in a process of its own, which is started anew when a call spoils it.

    Threads may not share one.

    Args:
        name, parameters: of the reward, as ``resolve`` takes them.
        seconds_per_call: deadline of each call: of one sample, or of one batch of a reward that
            takes batches.
        start_seconds: deadline of the process's start.
        memory_gib: most that the process and what it starts may hold, in GiB. Over it the samples
            whose calls are under way fail; a process that has come half the way starts anew after
            its batch, so that a leak costs no sample.
        base: folder of a relative ``file.py``; the working folder when None.
        source: what the file holds, see ``source_of``; None: as it is now.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        seconds_per_call: float = 10.0,
        start_seconds: float = 120.0,
        memory_gib: float = 32.0,
        base: Path | None = None,
        source: bytes | None = None,
    ) -> None:
        self.name = name
        base = base or Path.cwd()
        self._load = Load(name, dict(parameters or {}), base, source or source_of(name, base))
        self._seconds_per_call = seconds_per_call
        self._start_seconds = start_seconds
        self._most_bytes = int(memory_gib * 2**30)
        self._process = self._start()

    def _start(self) -> ScoringProcess:
        return ScoringProcess(self._load, self._start_seconds, self._most_bytes)

    def wait_until_ready(self) -> None:
        """Waits for the reward to be loaded; ``ValueError`` says why it cannot be used."""
        try:
            fault = self._process.wait_until_ready(self._start_seconds)
        except ProcessEnded as error:
            fault = f"reward '{self.name}': while loading, {error} (`start_timeout_seconds`)"
        if fault is not None:
            raise ValueError(fault)

    def score(self, items: Sequence[RewardItem], seconds: float) -> list[Outcome]:
        """The outcome of every item, in order, after at most ``seconds`` (and what ending a
        process takes). What was not scored by then is a failure of kind ``timeout``.

        Raises:
            RewardError: the reward returned something that is no reward; names the sample.
        """
        run = Progress(self.name, items, seconds, self._seconds_per_call)
        while left := run.left():
            if run.seconds_left() <= 0:
                run.give_up(run.overdue())
                break
            try:
                fault = self._process.wait_until_ready(run.seconds_left())
            except StillLoading:
                run.give_up(run.overdue())
                break
            except ProcessEnded as error:
                run.ended(Failure("error", str(error)), (), moved=False)
                self._restart()
                continue
            if fault is not None:
                run.give_up(Failure("error", f"could not be loaded again: {fault}"))
                self._restart()
                break
            self._hand_over(run, left)
        if (text := self._process.leaks()) is not None:
            _log.warning("reward '%s' starts anew: %s", self.name, text)
            self._restart()
        return run.outcomes()

    def _hand_over(self, run: Progress, left: list[int]) -> None:
        """Have the process score what is left, until it is done or ended."""
        items = [run.items[i] for i in left]
        memory = ledger_memory(items)
        with Ledger(os.dup(memory), items) as ledger:
            try:
                self._process.send(Work(items, self._seconds_per_call), memory, run.seconds_left())
                failure, late = self._follow(run, ledger, left)
            except ProcessEnded as error:
                failure = Failure("timeout" if self._process.timed_out else "error", str(error))
                late = ledger.under_way()
            except RewardError:
                self._restart()  # it is still at work on the rest
                raise
            finally:
                os.close(memory)
            run.settle(ledger, left)
            if failure is not None:
                run.ended(failure, [left[i] for i in late], moved=ledger.moves() > 0)
                self._restart()

    def _follow(
        self, run: Progress, ledger: Ledger, sent: list[int]
    ) -> tuple[Failure | None, Collection[int]]:
        """Take in what the process tells until it is done, or has to be ended: why, and the samples
        whose calls were late."""
        watch, looked = Watch(ledger, self._seconds_per_call), time.monotonic()
        while True:
            seconds = min(watch.seconds(), run.seconds_left())
            message = self._process.receive(max(min(seconds, LOOK_SECONDS), 0.0))
            if message is None and seconds <= 0:
                break
            if message is not None:
                if message[0] == "end":
                    return None, ()
                run.take(message, sent)
            if time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
                if (text := self._process.too_large()) is not None:
                    return Failure("error", text), ledger.under_way()
        before, failure = ledger.under_way(), run.overdue()
        calls = self._process.stop()
        now = ledger.under_way()
        text = f"{failure.text}; it was at\n{calls}" if calls else failure.text
        return Failure("timeout", text), [i for i in now if before.get(i) == now[i]]

    def _restart(self) -> None:
        self._process.end()
        self._process = self._start()

    def close(self) -> None:
        """End the process. Safe to call again."""
        self._process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
