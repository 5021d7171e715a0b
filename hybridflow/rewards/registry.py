"""The rewards that a recipe may name without a path."""

from collections.abc import Callable

from hybridflow.recipe import catalogue
from hybridflow.recipe.registry import Registry
from hybridflow.rewards.exact_match import exact_match
from hybridflow.rewards.format_regex import format_regex
from hybridflow.rewards.length import length
from hybridflow.rewards.number_match import number_match
from hybridflow.rewards.reasoning_gym import reasoning_gym

RewardFunction = Callable[[str, str, object, dict], float]
"""``fn(prompt, response, answer, row)`` with its parameters already bound."""

_REWARDS: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "format_regex": format_regex,
    "length": length,
    "number_match": number_match,
    "reasoning_gym": reasoning_gym,
}

REWARDS = Registry("reward", _REWARDS, aliases=catalogue.REWARDS.aliases)
"""``register`` adds one from Python, to be named like those that ship."""
