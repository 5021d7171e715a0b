"""The view of a running training: a live panel on a terminal, plain lines anywhere else."""

import logging
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console as Terminal
from rich.live import Live

from hybridflow.monitor.panel import render
from hybridflow.monitor.progress import Progress


class Console:
    """Shows a run while it goes. Use it as a context manager.

    On a terminal a panel stays at the bottom; prints, warnings and log records appear above it,
    never under it, and the terminal is restored when the block ends, by an exception too.
    Elsewhere (a pipe, a file) each ``every``-th step is one line without control codes, and so
    are a stage's first and last step and every step that was evaluated.
    """

    def __init__(
        self,
        title: str,
        stages: Mapping[str, int] | None = None,
        every: int = 1,
        file: TextIO | None = None,
        live: bool | None = None,
    ) -> None:
        """``stages``: steps per stage, for n/N and ETA. ``live``: None asks the file."""
        if every < 1:
            raise ValueError(f"every={every}: show each n-th step, n at least 1.")
        self._title = title
        self._every = every
        self._file = file if file is not None else sys.stdout
        self._progress = Progress(totals=dict(stages or {}))
        self._lock = threading.Lock()
        # The file decides, not FORCE_COLOR: a log must not fill with control codes.
        self._wants_live = self._file.isatty() if live is None else live
        self._terminal = Terminal(file=self._file, force_terminal=self._wants_live, highlight=False)
        if self._terminal.is_dumb_terminal:
            self._wants_live = False
        self._live: Live | None = None
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []

    def __enter__(self) -> "Console":
        if self._wants_live:
            streams = (sys.stdout, sys.stderr)
            self._live = Live(
                console=self._terminal, get_renderable=self._panel, refresh_per_second=2
            )
            self._live.start(refresh=True)
            self._move_log_handlers(*streams)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved.clear()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(
        self,
        step: int,
        stage: str,
        metrics: Mapping[str, float],
        node_seconds: Mapping[str, float],
        seconds: float | None = None,
    ) -> None:
        """Show a finished step; the arguments are those of ``RunWriter.step``."""
        with self._lock:
            first = stage != self._progress.stage
            self._progress.advance(step, stage, metrics, node_seconds, seconds)
            last = step == self._progress.total
            evaluated = any(name.startswith("eval/") for name in metrics)
            line = self._progress.line()
        if self._live is not None:
            self._live.refresh()
        elif first or last or evaluated or step % self._every == 0:
            self._write(line)

    def event(self, kind: str, text: str) -> None:
        """Show a line that stays: a checkpoint, an export, an error."""
        self.message(f"{kind}: {text}")

    def message(self, text: str) -> None:
        """Show a line that stays, above the panel where there is one."""
        if self._live is not None:
            self._terminal.print(text, markup=False)
        else:
            self._write(text)

    def _write(self, text: str) -> None:
        self._file.write(text + "\n")
        self._file.flush()

    def _panel(self) -> Any:
        with self._lock:
            return render(self._title, self._progress, self._terminal.width)

    def _move_log_handlers(self, *streams: TextIO) -> None:
        """Log handlers keep the stream they were made with: point them above the panel."""
        loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
        for logger in [logging.root, *loggers]:
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                    stream = handler.setStream(
                        sys.stdout if handler.stream is streams[0] else sys.stderr
                    )
                    self._moved.append((handler, stream))
