"""Reward functions: those that ship with the package, users' own, and scoring with deadlines.

A reward is ``fn(prompt, response, answer, row, **parameters)``, plain or ``async``, or a class
with ``score(items)``. Nothing here imports torch, ray or a server before a reward needs it.
"""

from hybridflow.rewards.items import Level, RewardItem
from hybridflow.rewards.outcomes import Failure, Outcome, RewardError, complaint
from hybridflow.rewards.policy import FunctionSettings, OnError, settle
from hybridflow.rewards.registry import REWARDS, importable
from hybridflow.rewards.resolve import Reward, resolve, source_of
from hybridflow.rewards.scorer import Scorer

__all__ = [
    "REWARDS",
    "Failure",
    "FunctionSettings",
    "Level",
    "OnError",
    "Outcome",
    "Reward",
    "RewardError",
    "RewardItem",
    "Scorer",
    "complaint",
    "importable",
    "resolve",
    "settle",
    "source_of",
]
