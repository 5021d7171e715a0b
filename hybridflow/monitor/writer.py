"""Writes a run folder: metrics, rollouts and events as JSON lines, scalars for TensorBoard."""

import threading
import time
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hybridflow.monitor import folder as files
from hybridflow.monitor.jsonl import NON_FINITE, Row, cut_tail, encode, open_append, plain
from hybridflow.monitor.tensorboard import ScalarWriter


class RunWriter:
    """The one writer of a run folder. Every line is flushed, so a crash loses nothing written.

    A fresh run in a folder that holds an earlier one moves that one's files to
    ``previous-1/``, ``previous-2/`` ... With ``resume_step`` the files are cut back to that step
    and the run goes on: lines of later steps and a torn last line are dropped. Steps count within
    their stage; name the stage resumed in ``resume_stage`` when the run has more than one, so that
    earlier stages stay whole and later ones go.

    Methods may be called from several threads.
    """

    def __init__(
        self,
        folder: str | Path,
        resume_step: int | None = None,
        resume_stage: str | None = None,
    ) -> None:
        if resume_stage is not None and resume_step is None:
            raise ValueError(f"resume_stage={resume_stage!r} needs resume_step beside it.")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            _set_aside(self.folder)
        else:
            _cut_back(self.folder, resume_step, resume_stage)
        self._lock = threading.Lock()
        self._metrics = open_append(self.folder / files.METRICS)
        self._rollouts = open_append(self.folder / files.ROLLOUTS)
        self._events = open_append(self.folder / files.EVENTS)
        self._scalars = ScalarWriter(self.folder / files.TENSORBOARD)
        self._last_step_at = time.monotonic()

    def step(
        self,
        step: int,
        stage: str,
        metrics: Mapping[str, float],
        node_seconds: Mapping[str, float],
        seconds: float | None = None,
    ) -> None:
        """Record one step. ``seconds`` is its wall time; by default the time since the last one.

        Raises TypeError naming a metric that is not a number.
        """
        numbers = _numbers(metrics, "metrics")
        nodes = _numbers(node_seconds, "node_seconds")
        with self._lock:
            now = time.monotonic()
            if seconds is None:
                seconds = now - self._last_step_at
            self._last_step_at = now
            row = {"stage": stage, "step": step, "time": time.time(), "seconds": seconds}
            _append(self._metrics, [row | {"metrics": numbers, "node_seconds": nodes}])
            scalars = numbers | {f"seconds/{name}": value for name, value in nodes.items()}
            self._scalars.write(stage, step, scalars | {"seconds/step": seconds})

    def rollouts(
        self, step: int, rows: Iterable[Mapping[str, Any]], stage: str | None = None
    ) -> None:
        """Record a step's rollouts.

        Each row holds at least ``prompt`` and ``response`` (texts) and ``reward``; the trainer
        adds ``length`` (tokens), ``finished``, ``version``, ``answer`` and, where several
        functions score, ``rewards`` (name -> number). ``evaluation`` is true for a held-out one.
        """
        place = {"step": step} if stage is None else {"stage": stage, "step": step}
        with self._lock:
            _append(self._rollouts, [place | dict(row) for row in rows])

    def event(self, kind: str, text: str, **details: Any) -> None:
        """Record an event: ``kind`` is start, checkpoint, evaluation, error, finish ..."""
        with self._lock:
            _append(self._events, [{"time": time.time(), "kind": kind, "text": text} | details])

    def close(self) -> None:
        with self._lock:
            for file in (self._metrics, self._rollouts, self._events):
                file.close()
            self._scalars.close()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _append(file: TextIO, rows: list[Row]) -> None:
    file.write("".join(map(encode, rows)))
    file.flush()


def _numbers(values: Mapping[str, Any], where: str) -> dict[str, float]:
    """The mapping with every value a Python int or float."""
    numbers = {}
    for name, value in values.items():
        number = plain(value, f"{where}[{name!r}]")
        number = NON_FINITE.get(number, number) if isinstance(number, str) else number
        if not isinstance(number, Real):
            raise TypeError(f"{where}[{name!r}] is {value!r}; a number is needed.")
        numbers[name] = float(number) if not isinstance(number, int) else int(number)
    return numbers


def _set_aside(folder: Path) -> None:
    """Move an earlier run's files to the next free ``previous-N`` folder."""
    names = (files.METRICS, files.ROLLOUTS, files.EVENTS, files.TENSORBOARD, files.REPORT)
    found = [folder / name for name in names if (folder / name).exists()]
    if not found:
        return
    count = 1
    while (folder / f"previous-{count}").exists():
        count += 1
    target = folder / f"previous-{count}"
    target.mkdir()
    for path in found:
        path.rename(target / path.name)


def _cut_back(folder: Path, resume_step: int, resume_stage: str | None) -> None:
    """Drop the metrics and rollouts of steps after the one resumed from; events stay."""
    later = _later_stages(folder, resume_stage)

    def keep(row: Row) -> bool:
        stage = row.get("stage")
        if resume_stage is not None and stage is not None and stage != resume_stage:
            return stage not in later
        return int(row["step"]) <= resume_step

    cut_tail(folder / files.METRICS, keep)
    cut_tail(folder / files.ROLLOUTS, keep)
    cut_tail(folder / files.EVENTS, lambda row: True)


def _later_stages(folder: Path, resume_stage: str | None) -> set[str]:
    """The stages that began after ``resume_stage``; none when it never wrote a step."""
    order = list(dict.fromkeys(str(row["stage"]) for row in files.read_metrics(folder)))
    if resume_stage not in order:
        return set()
    return set(order[order.index(resume_stage) + 1 :])
