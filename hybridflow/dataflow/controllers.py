"""What moves live values by itself after a step, by what the step measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from hybridflow.algorithms.adaptive_kl import adaptive_coefficient
from hybridflow.algorithms.lagrangian import next_multiplier
from hybridflow.dataflow.state import SharedState
from hybridflow.recipe.schema import Recipe

MEASURED_KL = {"loss": "update/kl", "reward": "reward/kl"}
"""What a step measures of the KL to the reference, by the place where it is charged."""


def move(state: SharedState, recipe: Recipe, metrics: Mapping[str, float], samples: int) -> None:
    """Let every controller of the recipe act on a step of ``samples`` samples.

    A step that measured nothing (the graph's ``delay`` kept its update away) moves nothing.
    """
    _move_kl(state, recipe, metrics, samples)
    _move_multiplier(state, recipe, metrics)


def _trained(metrics: Mapping[str, float]) -> bool:
    """Whether the actor took a step: its node was on, and not every response was masked."""
    return "update/loss" in metrics and metrics.get("update/tokens", 1.0) > 0


def _move_multiplier(state: SharedState, recipe: Recipe, metrics: Mapping[str, float]) -> None:
    """Lambda follows the cost of steps that train the actor, which alone can lower it."""
    told, cost = recipe.algorithm.lagrangian, metrics.get("cost/mean")
    if told is None or cost is None or not _trained(metrics) or not math.isfinite(cost):
        return
    rule = partial(next_multiplier, mean_cost=cost, limit=told.limit, rate=told.lr)
    state.revise("lambda", rule, by="algorithm.lagrangian")


def _move_kl(
    state: SharedState, recipe: Recipe, metrics: Mapping[str, float], samples: int
) -> None:
    """The coefficient follows the KL of steps that train the actor, which alone can answer."""
    told = recipe.algorithm.kl
    adaptive, kl = told.adaptive, metrics.get(MEASURED_KL[told.place])
    if adaptive is None or kl is None or not _trained(metrics) or not math.isfinite(kl):
        return
    rule = partial(
        adaptive_coefficient,
        kl=kl,
        target=adaptive.target,
        horizon=adaptive.horizon,
        samples=samples,
    )
    state.revise("kl_coef", rule, by="algorithm.kl.adaptive")
