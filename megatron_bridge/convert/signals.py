"""Signals that end a conversion, held back while they must not interrupt."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held() -> Iterator[None]:
    """Within, a signal that ends is only noted; it takes effect afterwards.

    Needed around a fork, after which a child would run the parent's handlers, and around steps
    that belong together. Processes forked within keep the noting handlers. For the main thread.
    """
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in ENDING}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])
