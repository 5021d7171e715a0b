"""A function on a thread of its own that never keeps the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(name: str, function: Callable[[], Result]) -> Future[Result]:
    """Starts ``function``; its result or exception is the future's."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks the future
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
