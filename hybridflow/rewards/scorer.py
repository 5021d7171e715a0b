"""Scores items in a process of their own, under deadlines that nothing can outlast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hybridflow.rewards.items import RewardItem
from hybridflow.rewards.outcomes import Outcome, Progress, RewardError
from hybridflow.rewards.process import ProcessEnded, ScoringProcess
from hybridflow.rewards.wire import Load, Work

_GRACE_SECONDS = 5.0
"""After a call's deadline, which the process keeps itself: when it is ended from here."""


class Scorer:
    """One reward in a process of its own, which is started anew when a call spoils it.

    Threads may not share one.

    Args:
        name, parameters: of the reward, as ``resolve`` takes them.
        seconds_per_call: deadline of each call: of one sample, or of one batch of a reward that
            takes batches.
        start_seconds: deadline of the process's start.
        base: folder of a relative ``file.py``; the working folder when None.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        seconds_per_call: float = 10.0,
        start_seconds: float = 120.0,
        base: Path | None = None,
    ) -> None:
        self.name = name
        self._load = Load(name, dict(parameters or {}), base or Path.cwd())
        self._seconds_per_call = seconds_per_call
        self._start_seconds = start_seconds
        self._process = ScoringProcess(self._load)

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
        run = Progress(self.name, items, seconds)
        while left := run.left():
            if run.seconds_left() <= 0:
                run.give_up("timeout", f"was not scored within the batch's {seconds:g} s")
                break
            try:
                fault = self._process.wait_until_ready(run.seconds_left())
                if fault is not None:
                    run.give_up("error", f"could not be loaded again: {fault}")
                    self._restart()
                    break
                work = Work([items[i] for i in left], self._seconds_per_call)
                self._process.send(work, run.seconds_left())
                self._follow(run, left)
            except ProcessEnded as error:
                run.ended(str(error), self._process.timed_out)
                self._restart()
            except RewardError:
                self._restart()  # it is still at work on the rest
                raise
        return run.outcomes()

    def _follow(self, run: Progress, sent: list[int]) -> None:
        """Take in what the process tells until it is done, or has to be ended."""
        while True:
            message = self._process.receive(run.patience(self._seconds_per_call + _GRACE_SECONDS))
            if message is None:
                self._process.end()
                run.overdue(self._seconds_per_call)
                self._restart()
                return
            if message[0] == "end":
                return
            run.take(message, sent)

    def _restart(self) -> None:
        self._process.end()
        self._process = ScoringProcess(self._load)

    def close(self) -> None:
        """End the process. Safe to call again."""
        self._process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
