"""The reward roles of a run: scoring, replacing workers that are lost, swapping what scores."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.batch import Batch
from hybridflow.cluster import CallTimeout, WorkerDied, WorkerGroup
from hybridflow.dataflow.reward_roles import (
    FailedSamples,
    ReloadedParameters,
    load_anew,
    reward_functions,
    reward_settings,
    scoring_models,
    swap_model,
    told_parameters,
)
from hybridflow.recipe.names import hint
from hybridflow.recipe.plan import Plan
from hybridflow.workers.reward import RewardWorker

Start = Callable[[str, Mapping[str, Any]], WorkerGroup]
"""Starts the workers of a reward role with the settings of its ``RewardWorker``."""


class Scoring:
    """What a team's reward roles do.

    A worker that takes the place of another one runs the same code: that which a function's file
    held when the run began, or at the role's last reload.

    Args:
        groups: every role's group, changed here when workers are replaced.

    Attributes:
        models: frozen Megatron models that score, and the recipe's folder of each.
        parameters: by reward role, those that a reload has put in the recipe's place.
        failed: holds each scoring against its role's ``max_failed_share``.
    """

    def __init__(self, plan: Plan, groups: dict[str, WorkerGroup], start: Start) -> None:
        self._recipe = plan.recipe
        self._groups = groups
        self._start = start
        roles = [role for role in plan.recipe.roles.rewards() if role in plan.roles]
        self._settings = {role: reward_settings(plan.recipe, role) for role in roles}
        self._replacing = threading.Lock()
        self.models = scoring_models(plan)
        self.parameters: dict[str, ReloadedParameters] = {}
        self.failed = FailedSamples(plan.recipe)

    def start(self, role: str) -> WorkerGroup:
        """The role's workers, starting."""
        return self._start(role, self._settings[role])

    def score(self, role: str, batch: Batch, seconds: float) -> tuple[Batch, str]:
        """What the workers of a reward role say of a batch, and what was repaired for it.

        They keep nothing from one call to the next: where one has died or stands still, all are
        started anew, once, and score the whole batch.
        """
        lost = self._groups[role]
        try:
            return lost.run(RewardWorker.score, batch, timeout=seconds), ""
        except (CallTimeout, WorkerDied) as error:
            first_line = str(error).splitlines()[0]
        with self._replacing:
            if self._groups[role] is lost:  # another node of the role may have met it first
                self._groups[role] = self.start(role).wait_until_started()
        result = self._groups[role].run(RewardWorker.score, batch, timeout=seconds)
        return result, f"the workers of '{role}' were started anew: {first_line}"

    def reload(self, role: str, parameters: Mapping[str, Any] | None = None) -> None:
        """Load a reward role's code and models anew, with other parameters where told. To be called
        between steps.

        Code is read and imported, and models are read, again. When one worker cannot use them, all
        keep what they have.

        Args:
            parameters: what takes the place of the recipe's ``parameters`` until the next reload;
                of a role of several ``functions``: by function, ``{name: parameters}``; of a model
                that scores: ``{"model": FOLDER}``. None: as they are.

        Raises:
            ValueError: no such role, or it cannot be used so; the old one is in service.
        """
        if role in self.models:
            self._keep(role, swap_model(self._groups[role], role, parameters, self.model_of(role)))
            return
        if role not in self._settings:
            raise ValueError(f"no reward role '{role}' is in service; {hint(role, self._settings)}")
        self._load(role, told_parameters(self._recipe.roles.rewards()[role], role, parameters))

    def _load(self, role: str, parameters: ReloadedParameters) -> None:
        kept = {**self.parameters.get(role, {}), **parameters}
        functions = reward_functions(self._recipe, role, kept)
        share = self._recipe.roles.rewards()[role].max_failed_share
        try:
            load_anew(self._groups[role], role, functions, share)
        except (CallTimeout, WorkerDied) as error:
            self._groups[role] = self.start(role).wait_until_started()
            first_line = str(error).splitlines()[0]
            raise ValueError(
                f"reward role '{role}' is unchanged; its workers were started anew: {first_line}"
            ) from error
        self._settings[role] = {**self._settings[role], "functions": functions}
        self._keep(role, parameters)

    def model_of(self, role: str) -> str:
        """The folder whose weights a model that scores has."""
        told = self.parameters.get(role, {}).get(role, {})
        return told.get("model", self.models[role])

    def restore(self, saved: Mapping[str, ReloadedParameters]) -> None:
        """Load the functions of reward roles with what ``parameters`` held."""
        for role, parameters in saved.items():
            if role in self.models:
                self.reload(role, parameters.get(role))
            elif role in self._settings:
                self._load(role, parameters)
            else:
                raise ValueError(f"no reward role '{role}' is in service")

    def code(self) -> dict[str, str]:
        """The digest of the file that each function was loaded from, by role and function."""
        return {
            f"{role}.{function.name}": hashlib.sha256(function.source).hexdigest()
            for role, settings in self._settings.items()
            for function in settings["functions"]
            if function.source is not None
        }

    def _keep(self, role: str, parameters: ReloadedParameters) -> None:
        kept = {**self.parameters.get(role, {}), **parameters}
        self.parameters = {**self.parameters, **({role: kept} if kept else {})}
