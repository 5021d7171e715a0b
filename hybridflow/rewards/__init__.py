"""Reward functions: those that ship with the package, users' own, and scoring with a deadline.

A reward is ``fn(prompt, response, answer, row, **parameters) -> float``. Nothing here imports
torch, ray or a server.
"""

from hybridflow.rewards.registry import REWARDS, RewardFunction
from hybridflow.rewards.resolve import resolve
from hybridflow.rewards.scoring import RewardError, RewardItem, RewardTimeout, score_batch

__all__ = [
    "REWARDS",
    "RewardError",
    "RewardFunction",
    "RewardItem",
    "RewardTimeout",
    "resolve",
    "score_batch",
]
