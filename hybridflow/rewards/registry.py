"""The rewards that a recipe may name without a path."""

from collections.abc import Callable
from typing import Any

from hybridflow.recipe import catalogue
from hybridflow.recipe.catalogue_rewards import RewardEntry
from hybridflow.recipe.own_code import place_of
from hybridflow.recipe.registry import Registry
from hybridflow.rewards.exact_match import exact_match
from hybridflow.rewards.format_regex import format_regex
from hybridflow.rewards.http import Http
from hybridflow.rewards.json_schema import JsonSchema
from hybridflow.rewards.length import length
from hybridflow.rewards.math_match import load_math_verify, math_match
from hybridflow.rewards.number_match import number_match
from hybridflow.rewards.reasoning_gym import load_reasoning_gym, reasoning_gym
from hybridflow.rewards.reward_model import RewardModel

_REWARDS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "format_regex": format_regex,
    "http": Http,
    "json_schema": JsonSchema,
    "length": length,
    "math": math_match,
    "number_match": number_match,
    "reasoning_gym": reasoning_gym,
    "reward_model": RewardModel,
}

_PREPARATIONS = {"math": load_math_verify, "reasoning_gym": load_reasoning_gym}


class _Rewards(Registry[Callable[..., Any]]):
    """Makes what is registered known to the checks of recipes too."""

    def register(self, name: str, entry: Callable[..., Any], *aliases: str) -> Callable[..., Any]:
        if name not in catalogue.REWARDS:
            text = (entry.__doc__ or name).strip().splitlines()[0]
            known = RewardEntry(text, token_level=True, from_python=True)
            catalogue.REWARDS.register(name, known, *aliases)
        return super().register(name, entry, *aliases)


REWARDS = _Rewards("reward", _REWARDS, aliases=catalogue.REWARDS.aliases)
"""``register`` adds one from Python, to be named like those that ship: a function or class of a
module, since it runs in other processes."""


def prepare(name: str) -> None:
    """Load what a reward needs, so that no sample's deadline pays for it.

    Raises:
        ValueError: a package is missing.
    """
    if name in REWARDS and (load := _PREPARATIONS.get(REWARDS.canonical(name))) is not None:
        load()


def importable(name: str) -> str:
    """The name by which another process finds a reward: the path of one that was registered."""
    if name not in REWARDS or REWARDS.canonical(name) in _REWARDS:
        return name
    return place_of(REWARDS[name])
