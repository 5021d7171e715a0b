"""A batch on its way through scoring processes: outcomes so far, and the deadlines that run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hybridflow.rewards.items import RewardItem
from hybridflow.rewards.ledger import Ledger
from hybridflow.rewards.outcomes import Failure, Outcome, RewardError, complaint
from hybridflow.rewards.process import ProcessEnded
from hybridflow.rewards.wire import GRACE_SECONDS

_ENDS_BETWEEN_CALLS = 3
"""How often in a row the process may end with no call under way before samples are given up."""


class Progress:
    """The batch of one ``score``.

    Args:
        seconds, seconds_per_call: deadlines of the batch and of each call.
    """

    def __init__(
        self, name: str, items: Sequence[RewardItem], seconds: float, seconds_per_call: float
    ) -> None:
        self._name = name
        self.items = items
        self._seconds = seconds
        self._seconds_per_call = seconds_per_call
        self._deadline = time.monotonic() + seconds
        self._outcomes: dict[int, Outcome] = {}
        self._idle_ends = 0

    def left(self) -> list[int]:
        """Items without an outcome, in order."""
        return [i for i in range(len(self.items)) if i not in self._outcomes]

    def outcomes(self) -> list[Outcome]:
        """Every item's, in order."""
        return [self._outcomes[i] for i in range(len(self.items))]

    def seconds_left(self) -> float:
        """Until the batch's deadline."""
        return self._deadline - time.monotonic()

    def take(self, message: Sequence[Any], sent: Sequence[int]) -> None:
        """One message about a sample without a score, whose index counts within ``sent``.

        Raises:
            RewardError: the reward returned something that is no reward.
            ProcessEnded: there is no such sample, so the message is not the program's.
        """
        kind, where, text = message
        if where >= len(sent):
            raise ProcessEnded(f"its process wrote of sample {where} of {len(sent)}")
        index = sent[where]
        if kind == "invalid":
            raise RewardError(complaint(self._name, self.items[index], index, text))
        self._outcomes[index] = Failure(kind, text)

    def overdue(self) -> Failure:
        """What those get whose calls were ended because they, or the whole batch, were late."""
        if self.seconds_left() <= 0:
            return Failure("timeout", f"was not scored within the batch's {self._seconds:g} s")
        return Failure("timeout", f"did not end within {self._seconds_per_call:g} s")

    def settle(self, ledger: Ledger, sent: Sequence[int]) -> None:
        """Take in what a process that is done, or gone, has scored."""
        scored = ledger.scored()
        self._outcomes |= {sent[i]: value for i, value in scored.items()}

    def ended(self, failure: Failure, late: Sequence[int], moved: bool) -> None:
        """A process is gone: the samples ``late`` have ``failure``, others are scored anew.

        Args:
            moved: whether anything became of a sample in that process.
        """
        self._outcomes |= dict.fromkeys(late, failure)
        self._idle_ends = 0 if moved else self._idle_ends + 1
        if self._idle_ends >= _ENDS_BETWEEN_CALLS:
            text = f"{failure.text}, {self._idle_ends} times while no call was under way"
            self.give_up(Failure(failure.kind, text))

    def give_up(self, failure: Failure) -> None:
        """No score for all that is left."""
        self._outcomes |= dict.fromkeys(self.left(), failure)


class Watch:
    """When the calls of a process are late, by its ledger.

    A plain call has its deadline from its start. ``async`` ones end themselves in time, unless
    one holds up the loop for as long as that: then all that are under way are late.
    """

    def __init__(self, ledger: Ledger, seconds_per_call: float) -> None:
        self._ledger = ledger
        self._seconds = seconds_per_call
        self._moves = -1
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Until it is time to look again; 0 where something is late.

        A call that starts after a look is late after the next one at the earliest.
        """
        return min(self._seconds, max(0.0, self._due() - time.monotonic()))

    def _due(self) -> float:
        oldest = min(self._ledger.under_way().values(), default=None)
        beat = self._ledger.last_beat()
        if oldest is None:  # between calls the process owes its next one
            return self._since_a_move() + self._seconds + GRACE_SECONDS
        if beat is None:
            return oldest + self._seconds
        return min(beat + self._seconds, oldest + self._seconds + GRACE_SECONDS)

    def _since_a_move(self) -> float:
        moves = self._ledger.moves()
        if moves != self._moves:
            self._moves, self._since = moves, time.monotonic()
        return self._since
