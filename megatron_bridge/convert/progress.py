"""How far a conversion is: one live line on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_bridge.convert.sizes import show_bytes

_LIVE_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
_BAR = 24


class Progress:
    """Shows bytes done and to do, speed and time left on stderr.

    It starts no thread: workers may be forked while it is on.

    Args:
        total: bytes of the whole conversion.
        done: bytes that earlier runs finished.
        shown: False: say nothing.
    """

    def __init__(self, total: int, done: int, *, shown: bool = True) -> None:
        self.total, self.done = total, done
        self._start_bytes = done
        self._start = self._last = time.monotonic()
        self._shown = shown
        self._console = Console(stderr=True)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._shown and self._console.is_terminal:
            self._live = Live(
                self._line(), console=self._console, auto_refresh=False, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def advance(self, count: int) -> None:
        """So many bytes are done in this run; draw, when it is time."""
        self.done = self._start_bytes + count
        now = time.monotonic()
        if not self._shown or now - self._last < (_LIVE_SECONDS if self._live else _PLAIN_SECONDS):
            return
        self._last = now
        if self._live is not None:
            self._live.update(self._line(), refresh=True)
        else:
            sys.stderr.write(f"{self.text()}\n")
            sys.stderr.flush()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    @property
    def speed(self) -> float:
        """Bytes per second of this run."""
        return (self.done - self._start_bytes) / max(self.seconds, 1e-9)

    def text(self) -> str:
        """1.20 GB of 2.00 GB (60%), 0.41 GB/s, 2 s left."""
        share = 100 * self.done // max(self.total, 1)
        return (
            f"{show_bytes(self.done)} of {show_bytes(self.total)} ({share}%), "
            f"{self.speed / 1e9:.2f} GB/s, {self._left()}"
        )

    def _left(self) -> str:
        if self.done == self._start_bytes:
            return "time left unknown"
        seconds = round((self.total - self.done) / self.speed)
        hours, minutes = seconds // 3600, seconds % 3600 // 60
        if hours:
            return f"{hours} h {minutes} min left"
        return f"{minutes} min {seconds % 60} s left" if minutes else f"{seconds} s left"

    def _line(self) -> Text:
        filled = _BAR * self.done // max(self.total, 1)
        bar = "━" * filled
        return Text.assemble((bar, "green"), ("─" * (_BAR - filled), "dim"), "  ", self.text())
