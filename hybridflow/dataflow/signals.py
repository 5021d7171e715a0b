"""Signals that end a run: each raises once in the main thread, so that every clean-up runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C's ends the run as that one does, with its own exit code."""

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)
        super().__init__(self.number.name)


@contextmanager
def orderly_end() -> Iterator[Callable[[], None]]:
    """Ctrl-C raises ``KeyboardInterrupt``, SIGTERM and SIGHUP raise ``Terminated``.

    Yields what the clean-up calls first: from then on further ones are not heeded, so that an
    impatient second Ctrl-C leaves no orphans. What was ignored before (``nohup``) stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    ending = False

    def handler(number: int, frame: FrameType | None) -> None:
        if not ending:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    def begin() -> None:
        nonlocal ending
        ending = True

    heeded = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield begin
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
