"""What the control port answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from hybridflow.dataflow.between_steps import Errand
from hybridflow.dataflow.control import prometheus
from hybridflow.dataflow.control.pulse import Pulse
from hybridflow.dataflow.control.server import Refused, Reply, Request, Route
from hybridflow.dataflow.state import SharedState, StateConflict
from hybridflow.dataflow.team import Team
from hybridflow.recipe.names import hint
from hybridflow.recipe.plan import Plan
from hybridflow.recipe.schema_control import ControlSection

_MOST_NAME = 100
HEALTH = "GET", "/health"
ENDPOINTS = (
    HEALTH,
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/state"),
    ("PATCH", "/v1/state"),
    ("POST", "/v1/reward/*/reload"),
)


def while_starting(pulse: Pulse, control: ControlSection) -> dict[tuple[str, str], Route]:
    """What answers until the workers have started: ``/health`` as ever, the rest by 503."""

    def not_yet(request: Request) -> Reply:
        raise Refused(503, "the workers are starting: GET /health says when steps are made")

    def alive(request: Request) -> Reply:
        return health(pulse, control.stall_seconds)

    return {key: alive if key == HEALTH else not_yet for key in ENDPOINTS}


class Routes:
    """The endpoints of one run."""

    def __init__(self, plan: Plan, team: Team, pulse: Pulse) -> None:
        self._plan, self._team, self._pulse = plan, team, pulse
        self._state: SharedState = team.state
        self._control = plan.recipe.control or ControlSection()

    def table(self) -> dict[tuple[str, str], Route]:
        """Every route by method and path."""
        answers = (self.health, self.metrics, self.models, self.state, self.change, self.reload)
        return dict(zip(ENDPOINTS, answers, strict=True))

    def health(self, request: Request) -> Reply:
        """200 while steps end in time, else 503."""
        return health(self._pulse, self._control.stall_seconds)

    def metrics(self, request: Request) -> Reply:
        """The latest step for Prometheus."""
        last, age = self._pulse.last()
        state = {**self._state.in_force(), "version": self._state.version_in_force}
        seen = self._pulse.since_the_start()
        text = prometheus.exposition(self._plan.recipe.name, last, age, state, *seen)
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
                **self._reloads(role),
                "values": {n: v for n, v in values.items() if self._state.declared[n].role == role},
            }
            for role in self._plan.roles
        }
        return Reply(200, {"run": self._plan.recipe.name, "roles": roles})

    def change(self, request: Request) -> Reply:
        """Accept a change of live values: ``{"values": {...}, "version": n, "by": name}``."""
        body = _mapping(request, ("values", "version", "by"))
        if not isinstance(body.get("values"), dict):
            raise Refused(422, 'the body is {"values": {NAME: NUMBER, ...}}')
        expected = body.get("version")
        if expected is not None and type(expected) is not int:
            raise Refused(422, "'version' is the version that the change is for, a whole number")
        with _refusals():
            self._state.change(body["values"], _asker(request), expected)
        return Reply(200, self._told())

    def reload(self, request: Request) -> Reply:
        """Load a reward role's functions anew before the next step, perhaps with other
        ``{"parameters": {...}}``."""
        role, body = request.parameter, _mapping(request, ("parameters", "by"))
        models = self._team.rewards.models
        rewards = [r for r in self._plan.roles if self._team.kinds[r] == "reward" or r in models]
        if role not in rewards:
            raise Refused(404, f"no reward role '{role}' takes part; {hint(role, rewards)}")
        parameters = body.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise Refused(422, "'parameters' is a mapping")
        change = f" with {json.dumps(parameters)}" if parameters is not None else ""
        text = f"reload of '{role}'{change} by {_asker(request)}"
        work = partial(self._team.rewards.reload, role, parameters)
        with _refusals():
            self._team.between.ask(role, Errand(text, work))
        return Reply(202, {"reload": self._team.between.status(role)})

    def _told(self) -> dict[str, Any]:
        return {
            "version": self._state.version,
            "version_in_force": self._state.version_in_force,
            "values": self._state.snapshot(),
        }

    def _reloads(self, role: str) -> dict[str, Any]:
        """The parameters in force of a reward role, and how its last reload ended."""
        status = self._team.between.status(role)
        rewards = self._plan.recipe.roles.rewards()
        if role in self._team.rewards.models:
            model = {"model": self._team.rewards.model_of(role)}
            return {"parameters": model, **({"reload": status} if status else {})}
        if role not in rewards:
            return {}
        told = self._team.rewards.parameters.get(role, {})
        parts = {name: part for name, (_, part) in rewards[role].parts(role).items()}
        parameters = {name: told.get(name, part.parameters) for name, part in parts.items()}
        return {"parameters": parameters, **({"reload": status} if status else {})}

    def _version(self, role: str, kind: str) -> dict[str, Any]:
        publisher = self._team.publisher
        if kind == "rollout" and publisher is not None:
            return {"version": self._team.version, "engines": publisher.fleet.states()}
        if role == "actor":
            return {"version": self._team.version}
        return {"version": 0} if kind == "model" else {}


def _mapping(request: Request, keys: tuple[str, ...]) -> dict[str, Any]:
    """The body, empty where there is none; it may have ``keys`` alone."""
    body = {} if request.body is None else request.body
    if not isinstance(body, dict):
        raise Refused(422, f"the body is a mapping with {', '.join(keys)}")
    for key in body.keys() - set(keys):
        raise Refused(422, f"unknown key '{key}'; {hint(key, keys)}")
    return body


def _asker(request: Request) -> str:
    """Who asks: the name that they give themselves, and where from."""
    by = request.body.get("by", "") if request.body else ""
    if not isinstance(by, str) or not (by.isprintable() and len(by) <= _MOST_NAME):
        raise Refused(422, f"'by' is a name of at most {_MOST_NAME} characters")
    return f"{by or 'someone'} at {request.client}"


@contextmanager
def _refusals() -> Iterator[None]:
    """A conflict is a 409, another mistake a 422."""
    try:
        yield
    except StateConflict as error:
        raise Refused(409, str(error)) from error
    except ValueError as error:
        raise Refused(422, str(error)) from error


def health(pulse: Pulse, stall_seconds: float) -> Reply:
    """503 when the last step, or the start, is more than ``stall_seconds`` ago."""
    last, age = pulse.last()
    stalled = age > stall_seconds
    content = {
        "status": "stalled" if stalled else "running" if last.global_step else "starting",
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
    functions = {name: part.function for name, (_, part) in section.parts(role).items()}
    return {"functions": functions, "layout": {"workers": section.workers}}
