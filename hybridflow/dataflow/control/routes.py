"""What the control port answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hybridflow.dataflow.control import prometheus
from hybridflow.dataflow.control.pulse import Pulse
from hybridflow.dataflow.control.server import Refused, Reply, Request, Route
from hybridflow.dataflow.state import SharedState, StateConflict
from hybridflow.dataflow.team import Team
from hybridflow.recipe.compile import Plan
from hybridflow.recipe.names import hint
from hybridflow.recipe.schema_control import ControlSection

_CHANGE = ("values", "version", "by")
_MOST_NAME = 100


class Routes:
    """The endpoints of one run."""

    def __init__(self, plan: Plan, team: Team, pulse: Pulse) -> None:
        self._plan, self._team, self._pulse = plan, team, pulse
        self._state: SharedState = team.state
        self._control = plan.recipe.control or ControlSection()

    def table(self) -> dict[tuple[str, str], Route]:
        """Every route by method and path."""
        return {
            ("GET", "/health"): self.health,
            ("GET", "/metrics"): self.metrics,
            ("GET", "/v1/models"): self.models,
            ("GET", "/v1/state"): self.state,
            ("PATCH", "/v1/state"): self.change,
        }

    def health(self, request: Request) -> Reply:
        """200 while steps end in time, else 503."""
        return health(self._pulse, self._control.stall_seconds)

    def metrics(self, request: Request) -> Reply:
        """The latest step for Prometheus."""
        last, age = self._pulse.last()
        state = {**self._state.in_force(), "version": self._state.version_in_force}
        text = prometheus.exposition(self._plan.recipe.name, last, age, state)
        return Reply(200, text, prometheus.CONTENT_TYPE)

    def state(self, request: Request) -> Reply:
        """Every live value."""
        return Reply(200, self._told())

    def models(self, request: Request) -> Reply:
        """Every role that takes part, with what may be changed of it."""
        values = self._state.snapshot()
        kinds = self._team.kinds
        roles = {
            role: {
                "kind": kinds[role],
                **_layout(self._plan, role, kinds[role]),
                **self._version(role, kinds[role]),
                "values": {n: v for n, v in values.items() if self._state.declared[n].role == role},
            }
            for role in self._plan.roles
        }
        return Reply(200, {"run": self._plan.recipe.name, "roles": roles})

    def change(self, request: Request) -> Reply:
        """Accept a change of live values: ``{"values": {...}, "version": n, "by": name}``."""
        body = request.body
        if not isinstance(body, dict) or not isinstance(body.get("values"), dict):
            raise Refused(422, 'the body is {"values": {NAME: NUMBER, ...}}')
        for key in body.keys() - set(_CHANGE):
            raise Refused(422, f"unknown key '{key}'; {hint(key, _CHANGE)}")
        expected, by = body.get("version"), body.get("by", "")
        if expected is not None and type(expected) is not int:
            raise Refused(422, "'version' is the version that the change is for, a whole number")
        if not isinstance(by, str) or not (by.isprintable() and len(by) <= _MOST_NAME):
            raise Refused(422, f"'by' is a name of at most {_MOST_NAME} characters")
        who = f"{by or 'someone'} at {request.client}"
        try:
            self._state.change(body["values"], who, expected)
        except StateConflict as error:
            raise Refused(409, str(error)) from error
        except ValueError as error:
            raise Refused(422, str(error)) from error
        return Reply(200, self._told())

    def _told(self) -> dict[str, Any]:
        return {
            "version": self._state.version,
            "version_in_force": self._state.version_in_force,
            "values": self._state.snapshot(),
        }

    def _version(self, role: str, kind: str) -> dict[str, Any]:
        publisher = self._team.publisher
        if kind == "rollout" and publisher is not None:
            return {"version": self._team.version, "engines": publisher.fleet.states()}
        if role == "actor":
            return {"version": self._team.version}
        return {"version": 0} if kind == "model" else {}


def health(pulse: Pulse, stall_seconds: float) -> Reply:
    """503 when the last step, or the start, is more than ``stall_seconds`` ago."""
    last, age = pulse.last()
    stalled = age > stall_seconds
    content = {
        "status": "stalled" if stalled else "running",
        "stage": last.stage,
        "step": last.step,
        "global_step": last.global_step,
        "step_age_seconds": age,
        "stall_seconds": stall_seconds,
    }
    return Reply(503 if stalled else 200, content)


def _layout(plan: Plan, role: str, kind: str) -> Mapping[str, Any]:
    recipe = plan.recipe
    pool = plan.pool_of(role)
    place = {} if pool is None else {"pool": pool.name}
    if role in plan.layouts:
        return {"layout": asdict(plan.layouts[role]), **place}
    if kind == "rollout":
        section = recipe.roles.rollout
        assert section is not None, "a rollout that takes part is in the recipe"
        return {"engine": section.engine, "layout": section.parallel.model_dump(), **place}
    section = recipe.roles.rewards()[role]
    return {"function": section.function, "layout": {"workers": section.workers}}
