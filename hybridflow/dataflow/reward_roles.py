"""Reward roles: from the recipe to their workers' settings, swapping them, and their metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.cluster import WorkerGroup
from hybridflow.recipe.names import hint
from hybridflow.recipe.plan import Plan
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.schema_rewards import RewardSection
from hybridflow.rewards import FunctionSettings, RewardError, importable, source_of
from hybridflow.workers.model import ModelWorker
from hybridflow.workers.reward import COMPONENT, FAILED, TIMEOUT, RewardWorker

ReloadedParameters = Mapping[str, Mapping[str, Any]]
"""By the name of a role's function: what took the place of the recipe's ``parameters``."""


def reward_settings(recipe: Recipe, role: str) -> dict[str, Any]:
    """The arguments of the role's ``RewardWorker``."""
    section = recipe.roles.rewards()[role]
    return {
        "model_path": recipe.model.path,
        "functions": reward_functions(recipe, role, {}),
        "level": section.level,
        "seconds_per_step": section.timeout_seconds,
        "seconds_per_call": section.sample_timeout_seconds,
        "start_seconds": section.start_timeout_seconds,
        "memory_gib": section.memory_gib,
    }


def reward_functions(recipe: Recipe, role: str, told: ReloadedParameters) -> list[FunctionSettings]:
    """The role's functions with what their files hold now, so that all its workers, and those that
    take their place, run the same; ``told`` are parameters in the place of the recipe's."""
    section = recipe.roles.rewards()[role]
    return [
        FunctionSettings(
            name=name,
            function=importable(part.function),
            parameters=told.get(name, part.parameters),
            weight=part.weight,
            on_error=section.policy(part),
            source=source_of(importable(part.function), Path.cwd()),
        )
        for name, (_, part) in section.parts(role).items()
    ]


def told_parameters(
    section: RewardSection, role: str, parameters: Mapping[str, Any] | None
) -> ReloadedParameters:
    """What a reload tells, by function.

    Raises:
        ValueError: the role has no such function, or no checkpoint could hold the parameters.
    """
    if parameters is not None and section.functions is None:
        parameters = {role: parameters}
    for name, told in (parameters or {}).items():
        parts = section.parts(role)
        if name not in parts:
            raise ValueError(f"reward role '{role}' has no function '{name}'; {hint(name, parts)}")
        if not isinstance(told, Mapping):
            raise ValueError(f"the parameters of '{name}' must be a mapping, not {told!r}")
    by_function = {name: dict(told) for name, told in (parameters or {}).items()}
    try:
        json.dumps(by_function, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the parameters are no JSON, in which a checkpoint keeps them: {error}"
        ) from error
    return by_function


def load_anew(
    group: WorkerGroup, role: str, functions: Sequence[FunctionSettings], failed_share: float
) -> None:
    """Have every worker of a role load ``functions`` and try them, or none.

    Args:
        failed_share: most of the samples that are tried which may fail.
    """
    faults = group.run(RewardWorker.prepare, functions, failed_share)
    fault = next((fault for fault in faults if fault is not None), None)
    group.run(RewardWorker.swap, fault is None)
    if fault is not None:
        raise ValueError(f"reward role '{role}' is unchanged: {fault}")


def scoring_models(plan: Plan) -> dict[str, str]:
    """Frozen Megatron models that score, and the folder of each."""
    kinds, trained = plan.recipe.roles.kinds(), {r for s in plan.stages for r in s.trained}
    nodes = [node for stage in plan.stages for node in stage.graph.nodes if node.call == "score"]
    roles = dict.fromkeys(str(node.role) for node in nodes)
    return {
        role: plan.recipe.model_path(role)
        for role in roles
        if kinds.get(role) == "value" and role not in trained
    }


def swap_model(
    group: WorkerGroup, role: str, parameters: Mapping[str, Any] | None, held: str
) -> ReloadedParameters:
    """Have every rank of a model that scores read the weights of ``{"model": FOLDER}``, or of the
    folder ``held`` anew.

    Raises:
        ValueError: they cannot be used; the weights of ``held`` are in service.
    """
    told = dict(parameters or {})
    folder = told.pop("model", held)
    if told or not isinstance(folder, str):
        raise ValueError(
            f"a model that scores takes {{'model': FOLDER}}, not {dict(parameters or {})}"
        )
    faults = [fault for fault in group.run(ModelWorker.try_pretrained, folder) if fault is not None]
    if faults:
        group.run(ModelWorker.load_pretrained, held)  # some weights may have been read
        raise ValueError(f"reward role '{role}' is unchanged: {faults[0]}")
    return {role: {"model": folder}}


class FailedSamples:
    """Samples without a score, which got what `on_error` says: too many end the run."""

    def __init__(self, recipe: Recipe) -> None:
        self._allowed = {r: s.max_failed_share for r, s in recipe.roles.rewards().items()}
        self._told: set[str] = set()

    def see(self, role: str, group: WorkerGroup, result: Batch) -> str | None:
        """What to tell of a ``score`` of the role: its first one with such samples.

        Raises:
            RewardError: more than ``max_failed_share`` of the samples have no score.
        """
        codes = [data for field, data in result.fields.items() if field.startswith(FAILED + ":")]
        count = int((torch.stack(codes) != 0).any(dim=0).sum()) if codes else 0
        over = count > self._allowed[role] * result.samples
        if not count or (role in self._told and not over):
            return None
        self._told.add(role)
        first = next(filter(None, group.run(RewardWorker.first_failure)))
        text = f"{count} of {result.samples} samples of '{role}' have no score; {first}"
        if over:
            key = f"roles.{role}.max_failed_share"
            raise RewardError(
                f"{text}; that is more than {key}={self._allowed[role]:g} allows: mend what "
                f"scores, or raise {key}"
            )
        return (
            f"{text}; they got what `on_error` says, and reward/{role}/.../errors and timeouts "
            "count them from now on"
        )


def is_constant(rewards_S: Tensor) -> float:
    """1.0 where every reward of a step is one number, else 0.0: there is nothing to learn from, and
    perhaps the function does not see what it is to judge."""
    return float(rewards_S.min() == rewards_S.max())


def score_metrics(role: str, result: Batch, label: str | None = None) -> dict[str, float]:
    """Of a role's ``score``: mean and spread of each of several functions, and how many samples of
    each raised (``errors``) or were late (``timeouts``), where these do not end the run.

    Args:
        label: what they are listed under; None: the role.
    """
    found: dict[str, float] = {}
    label = label or role
    for field, data in result.fields.items():
        kind, _, name = field.partition(":")
        part = label if name == role else f"{label}/{name}"
        if kind == COMPONENT:
            found[f"reward/{part}/mean"] = data.double().mean().item()
            found[f"reward/{part}/std"] = data.double().std(unbiased=False).item()
        elif kind == FAILED:
            late = int((data == TIMEOUT).sum())
            found[f"reward/{part}/errors"] = float(int((data != 0).sum()) - late)
            found[f"reward/{part}/timeouts"] = float(late)
    return found
