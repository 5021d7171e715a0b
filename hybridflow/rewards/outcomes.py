"""What became of each item of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridflow.rewards.items import RewardItem

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
