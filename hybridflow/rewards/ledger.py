"""What becomes of a batch's samples, in memory that the scoring process and its worker share.

The process writes when a call starts and what it gave; the worker reads it when the batch is done,
or the process is dead. So samples cost no message, and nothing is lost with the process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Self

from hybridflow.rewards.items import RewardItem

_WAITING, _UNDER_WAY, _SCORED, _FAILED = range(4)
_WORD = 8


class Ledger:
    """Of one batch: per sample a state (uint8) and when its call started, and all values.

    Times are seconds of the machine's monotonic clock, the same in both processes.

    Args:
        fd: what ``ledger_memory`` made; closed here.
        items: the batch, in the same order on both sides.
    """

    def __init__(self, fd: int, items: Sequence[RewardItem]) -> None:
        count = len(items)
        self._places = _places(items)
        self._by_token = bool(items) and items[0].tokens is not None
        self._memory = mmap.mmap(fd, 0)
        os.close(fd)
        whole = memoryview(self._memory)
        words = [1, count, self._places[-1]]
        ends = [*accumulate((_WORD * n for n in words), initial=0)]
        parts = [whole[a:b].cast("d") for a, b in zip(ends, ends[1:], strict=False)]
        self._beat, self._started, self._values = parts
        self._states = whole[ends[-1] : ends[-1] + count]
        self._views = [*parts, self._states, whole]
        self._pid = os.getpid()

    def begin(self, chunk: Sequence[int]) -> float:
        """A call for these samples starts; when, in seconds."""
        self._only_here()
        now = time.monotonic()
        for index in chunk:
            self._started[index] = now
            self._states[index] = _UNDER_WAY
        return now

    def score(self, index: int, value: float | list[float]) -> None:
        """The reward of a sample, or of each of its tokens."""
        self._only_here()
        place = self._places[index]
        if isinstance(value, list):
            for offset, number in enumerate(value):
                self._values[place + offset] = number
        else:
            self._values[place] = value
        self._states[index] = _SCORED

    def fail(self, index: int) -> None:
        """A sample has no score; a message says why."""
        self._only_here()
        self._states[index] = _FAILED

    def beat(self) -> None:
        """The loop of ``async`` calls is alive."""
        self._only_here()
        self._beat[0] = time.monotonic()

    def _only_here(self) -> None:
        """A fork that a user's code left behind scores nothing: it ends."""
        if os.getpid() != self._pid:
            os._exit(0)

    def last_beat(self) -> float | None:
        """When the loop of ``async`` calls was last alive; None where there is none."""
        return self._beat[0] or None

    def under_way(self) -> dict[int, float]:
        """Samples whose calls have started and not ended, and when they started."""
        states, now = bytes(self._states), time.monotonic()
        found: dict[int, float] = {}
        index = states.find(_UNDER_WAY)
        while index >= 0:
            found[index] = self._started[index] or now
            index = states.find(_UNDER_WAY, index + 1)
        return found

    def moves(self) -> int:
        """Counts what has happened to samples so far."""
        states = bytes(self._states)
        return 2 * (len(states) - states.count(_WAITING)) - states.count(_UNDER_WAY)

    def scored(self) -> dict[int, float | list[float]]:
        """Every value so far, by sample."""
        values = [*map(float, self._values)]
        done = [i for i, state in enumerate(bytes(self._states)) if state == _SCORED]
        if not self._by_token:
            return {i: values[i] for i in done}
        return {i: values[self._places[i] : self._places[i + 1]] for i in done}

    def close(self) -> None:
        """Give the memory back."""
        for view in self._views:
            view.release()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ledger_memory(items: Sequence[RewardItem]) -> int:
    """Zeroed memory for a ``Ledger`` of ``items``, as a file that nothing can grow or cut: what
    users' code writes into files that it does not know is refused."""
    size = _WORD * (1 + len(items) + _places(items)[-1]) + len(items)
    fd = os.memfd_create("reward-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, size)
    os.lseek(fd, size, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def _places(items: Sequence[RewardItem]) -> list[int]:
    """Where each sample's values start, and where the last one's end."""
    widths = (1 if item.tokens is None else len(item.tokens) for item in items)
    return [*accumulate(widths, initial=0)]
