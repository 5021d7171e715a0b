"""What became of each item of a batch, and the deadlines that are running."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.rewards.items import RewardItem

_ENDS_BETWEEN_CALLS = 3
"""How often in a row the process may end with no call under way before samples are given up."""

Kind = Literal["error", "timeout"]


class RewardError(RuntimeError):
    """A reward returned what is no reward, or failed where its policy is to end the run."""


@dataclass(frozen=True)
class Failure:
    """A sample without a score: its call raised or ended the process, or took too long."""

    kind: Kind
    text: str


Outcome = float | list[float] | Failure
"""Of one item: its reward, a reward for each of its tokens, or why there is none."""


def complaint(name: str, item: RewardItem, index: int, text: str) -> str:
    """The message about a sample: which reward, which sample, what happened."""
    return f"reward '{name}', {item.describe(index)}: {text}"


class Progress:
    """The batch of one ``score``: outcomes so far, and the calls under way."""

    def __init__(self, name: str, items: Sequence[RewardItem], seconds: float) -> None:
        self._name = name
        self._items = items
        self._deadline = time.monotonic() + seconds
        self._outcomes: dict[int, Outcome] = {}
        self._started: dict[int, float] = {}
        self._idle_ends = 0

    def left(self) -> list[int]:
        """Items without an outcome, in order."""
        return [i for i in range(len(self._items)) if i not in self._outcomes]

    def outcomes(self) -> list[Outcome]:
        """Every item's, in order."""
        return [self._outcomes[i] for i in range(len(self._items))]

    def seconds_left(self) -> float:
        """Until the batch's deadline."""
        return self._deadline - time.monotonic()

    def patience(self, seconds_per_call: float) -> float:
        """How long to wait for the next message: until a call under way is overdue, or the
        batch is. Between calls the process itself owes a message."""
        oldest = min(self._started.values(), default=time.monotonic())
        overdue = oldest + seconds_per_call - time.monotonic()
        return max(0.0, min(overdue, self.seconds_left()))

    def take(self, message: list[Any], sent: list[int]) -> None:
        """One message of the process, whose indices count within ``sent``.

        Raises:
            RewardError: the reward returned something that is no reward.
        """
        kind, where = message[:2]
        if kind == "start":
            self._started |= dict.fromkeys((sent[i] for i in where), time.monotonic())
            return
        index = sent[where]
        self._started.pop(index, None)
        self._idle_ends = 0
        if kind == "invalid":
            raise RewardError(complaint(self._name, self._items[index], index, message[2]))
        self._outcomes[index] = message[2] if kind == "done" else Failure(kind, message[2])

    def ended(self, cause: str, timed_out: bool) -> None:
        """The process is gone: the calls that were under way failed."""
        kind: Kind = "timeout" if timed_out else "error"
        self._outcomes |= dict.fromkeys(self._started, Failure(kind, cause))
        self._idle_ends = 0 if self._started else self._idle_ends + 1
        self._started.clear()
        if self._idle_ends >= _ENDS_BETWEEN_CALLS:
            self.give_up("error", f"{cause}, {self._idle_ends} times while no call was under way")

    def overdue(self, seconds_per_call: float) -> None:
        """The process was ended because a call was late, or the whole batch."""
        text = f"did not end within {seconds_per_call:g} s"
        self._outcomes |= dict.fromkeys(self._started, Failure("timeout", text))
        self._idle_ends = 0 if self._started else self._idle_ends + 1
        self._started.clear()

    def give_up(self, kind: Kind, text: str) -> None:
        """No score for all that is left."""
        self._outcomes |= dict.fromkeys(self.left(), Failure(kind, text))
