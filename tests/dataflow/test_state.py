"""Live values: atomic, bounded, versioned, in force between steps, kept over a restart."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.cluster import LocalSession
from hybridflow.dataflow import controllers
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.dataflow.live_values import live_values
from hybridflow.dataflow.runner import SerialRunner
from hybridflow.dataflow.state import (
    Change,
    LiveValue,
    SharedState,
    StateConflict,
    changes_after,
)
from hybridflow.dataflow.team import Team
from hybridflow.monitor import RunWriter, read_events, read_metrics
from hybridflow.recipe.activate import SHIPPED
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.graph import Graph, Node
from hybridflow.recipe.load import load_recipe


def state_of(record: Callable[[Change], None] = lambda change: None) -> SharedState:
    return SharedState(
        [
            LiveValue("coef", 0.5, 0.0, 1.0),
            LiveValue("heat", 1.0, 0.1, 10.0),
            LiveValue("kept", 20, -1, 100, never=(0,)),
            LiveValue("step", 0, 0, 100, fixed="the run counts it"),
        ],
        record,
    )


def test_a_change_comes_into_force_between_steps() -> None:
    changes: list[Change] = []
    state = state_of(changes.append)
    assert state.change({"coef": 0.25, "heat": 2.0}, by="someone") == 1
    assert (state["coef"], state["heat"], state.version_in_force) == (0.5, 1.0, 0)
    assert state.snapshot()["coef"] == {
        "value": 0.5,
        "next": 0.25,
        "low": 0.0,
        "high": 1.0,
        "description": "",
    }
    state.apply()
    assert (state["coef"], state["heat"], state.version_in_force) == (0.25, 2.0, 1)
    assert changes == [Change(1, "someone", {"coef": (0.5, 0.25), "heat": (1.0, 2.0)})]
    text = "version 1 by someone: coef 0.5 -> 0.25, heat 1 -> 2, from the next step on"
    assert str(changes[0]) == text
    assert state.change({"coef": 0.25}, by="again") == 1, "no change is no version"
    assert len(changes) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"coef": 1.5}, "'coef' = 1.5 is out of bounds: it is between 0 and 1"),
        ({"coef": -1e-9, "heat": 11}, "'coef'.*; 'heat' = 11 is out of bounds.* 0.1 and 10"),
        ({"coef": True}, "'coef' is a finite number, not True"),
        ({"coef": float("nan")}, "'coef' is a finite number, not nan"),
        ({"coef": "0.1"}, "'coef' is a finite number, not '0.1'"),
        ({"kept": 1.5}, "'kept' is a whole number, not 1.5"),
        ({"kept": 0}, "'kept' = 0 is out of bounds: it is between -1 and 100 and never 0"),
        ({"coeff": 0.1}, "no live value 'coeff'; did you mean 'coef'\\? Valid: coef, heat"),
        ({"coef": None}, "'coef' is a finite number, not None"),
    ],
)
def test_a_wrong_value_names_its_bounds_and_changes_nothing(values: dict, message: str) -> None:
    state = state_of()
    with pytest.raises(ValueError, match=message) as caught:
        state.change({**values, **({} if "heat" in values else {"heat": 3.0})}, by="someone")
    assert not isinstance(caught.value, StateConflict)
    state.apply()
    assert (state["coef"], state["heat"], state.version) == (0.5, 1.0, 0)


def test_conflicts() -> None:
    state = state_of()
    with pytest.raises(StateConflict, match="'step' is fixed: the run counts it"):
        state.change({"step": 3, "coef": 0.1}, by="someone")
    assert state.change({"coef": 0.1}, by="first", expected=0) == 1
    with pytest.raises(StateConflict, match="for version 0, but .* have version 1 by now"):
        state.change({"coef": 0.2}, by="second", expected=0)
    state.apply()
    assert state["coef"] == 0.1
    state.put(step=7)
    assert (state["step"], state.version) == (7, 1)


def test_a_rule_moves_the_latest_accepted_value_within_its_bounds() -> None:
    state = state_of()
    state.change({"coef": 0.2}, by="someone")
    state.revise("coef", lambda old: 2 * old, by="a rule")
    state.apply()
    assert state["coef"] == 0.4
    state.revise("coef", lambda old: 10 * old, by="a rule")
    state.apply()
    assert state["coef"] == 1.0


CHANGES = st.lists(
    st.dictionaries(
        st.sampled_from(["coef", "heat", "kept"]),
        st.one_of(st.integers(-2, 12), st.floats()),
        min_size=1,
    ),
    max_size=8,
)


@given(CHANGES)
def test_what_is_saved_goes_on(changes: list[dict[str, float]]) -> None:
    """Whatever was asked for, the values stay in their bounds and survive JSON."""
    state = state_of()
    for values in changes:
        try:
            state.change(values, by="someone")
        except ValueError:
            continue
    again = state_of()
    again.restore(json.loads(json.dumps(state.saved())))
    assert again.saved() == state.saved()
    assert all(not v.problem(state.saved()["values"][v.name]) for v in state.declared.values())
    assert again.version_in_force == state.version


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"version": 1}, "no saved live values"),
        ({"version": 1, "moved": [], "values": {"lost": 1.0}}, "no live value 'lost'"),
        ({"version": 1, "moved": [], "values": {"coef": 2.0}}, "'coef' = 2.0 is out of bounds"),
    ],
)
def test_what_does_not_fit_is_not_restored(saved: dict, message: str) -> None:
    state = state_of()
    with pytest.raises(ValueError, match=message):
        state.restore(saved)
    assert (state["coef"], state.version) == (0.5, 0)


def test_many_threads_see_whole_changes_and_lose_none() -> None:
    changes: list[Change] = []
    state = state_of(changes.append)
    torn: list[tuple[float, float]] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen = state.snapshot()
            if seen["heat"]["next"] != 10 * seen["coef"]["next"]:
                torn.append((seen["heat"]["next"], seen["coef"]["next"]))

    def write(seed: int) -> None:
        for turn in range(100):
            part = 0.1 + (seed * 100 + turn) / 1000
            state.change({"coef": part, "heat": 10 * part}, by="a writer")

    state.change({"coef": 0.1, "heat": 1.0}, by="start")
    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(1, 5)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join(60)
    over.set()
    reader.join(60)
    assert not torn
    assert [change.version for change in changes] == list(range(1, 402))
    moves = [change.values["coef"] for change in changes]
    assert all(new == old for (_, new), (old, _) in pairwise(moves))


class Meddler(SerialRunner):
    """Runs nodes one by one and, in the first generating step, asks for changes."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask

    def run(self, graph: Graph, nodes: Iterable[Node], run_node: Callable[[Node], None]) -> None:
        super().run(graph, nodes, run_node)
        if any(node.call == "generate" for node in graph.nodes):
            self._ask()


def test_a_run_reads_them_between_steps_and_keeps_them(make_recipe, tmp_path, monkeypatch) -> None:
    """A change during a step is in force from the next one on, and in the resumed run."""
    states: list[SharedState] = []
    begin = Team.__init__

    def remember(self: Team, *args: object) -> None:
        begin(self, *args)
        states.append(self.state)

    monkeypatch.setattr(Team, "__init__", remember)
    wanted = {"actor_lr": 5e-4, "max_tokens": 2, "temperature": 0.7, "kl_coef": 0.2}

    def ask() -> None:
        if states[0].version == 0:
            states[0].change(wanted, by="a test")

    def run(*overrides: str, **options: bool) -> Path:
        recipe = make_recipe(
            *("warm_start=null", "algorithm.kl.coef=0.1", "roles.reference={colocate: actor}"),
            *("roles.actor.optimizer.schedule=constant", "evaluation=null", *overrides),
        )
        launch = LaunchOptions(live=False, **options)
        return train(compile_recipe(recipe), lambda logs: LocalSession(), launch, Meddler(ask))

    folder = run("steps=2")
    first, second = (row["metrics"] for row in read_metrics(folder))
    assert (first["update/lr"], second["update/lr"]) == (1e-3, 5e-4)
    assert first["length/max"] > 2 >= second["length/max"]
    assert second["update/rollout_gap_max"] < 1e-4, "the trainer follows the temperature"
    (event,) = [event for event in read_events(folder) if event["kind"] == "state"]
    assert (event["by"], event["version"]) == ("a test", 1)
    assert event["values"]["kl_coef"] == [0.1, 0.2]
    assert "coef: 0.1" in (folder / "recipe.yaml").read_text(), "the recipe never changes"

    run("steps=3", resume=True)
    assert {name: states[1][name] for name in wanted} == wanted
    assert states[1]["step"] == 3
    third = read_metrics(folder)[2]["metrics"]
    assert third["update/lr"] == 5e-4 and third["length/max"] <= 2


def test_a_change_that_cannot_be_recorded_is_not_accepted() -> None:
    def full(change: Change) -> None:
        raise OSError("no space left on device")

    state = SharedState([LiveValue("lr", 0.1, 0.0, 1.0)], full)
    with pytest.raises(OSError, match="no space"):
        state.change({"lr": 0.5}, by="a test")
    state.apply()
    assert (state["lr"], state.version) == (0.1, 0)


def test_the_begin_of_a_stage_undoes_a_change_openly() -> None:
    seen: list[Change] = []
    values = [LiveValue("lr", 0.1, 0.0, 1.0), LiveValue("other", 1.0, 0.0, 9.0)]
    state = SharedState(values, seen.append)
    state.begin({"lr": 0.2, "other": 2.0}, "stage a")
    assert not seen and state["lr"] == 0.2, "nobody had changed it"
    state.change({"lr": 0.5}, by="a test")
    state.begin({"lr": 0.3, "other": 3.0}, "stage b")
    assert state.version == 2 and seen[-1].values == {"lr": (0.5, 0.3)}
    assert (state["lr"], state["other"]) == (0.3, 3.0)


def test_changes_that_a_resume_undoes_are_found(tmp_path: Path) -> None:
    change = Change(3, "someone", {"coef": (0.5, 0.25)})
    rule = Change(4, "algorithm.kl.adaptive", {"coef": (0.25, 0.2)}, rule=True)
    with RunWriter(tmp_path) as writer:
        for text in ("version 1 by a", "version 2 by b"):
            writer.event("state", text, rule=False)
        writer.event("checkpoint", f"{tmp_path}/checkpoints/step-000002")
        writer.event("state", str(change), rule=False)
        writer.event("state", str(rule), rule=True)
        writer.event("reload", "reload of 'reward' by a: done")
        writer.event("reload", "reload of 'reward' by b: failed; no such file")
    checkpoint = Path("elsewhere/checkpoints/step-000002")
    assert changes_after(checkpoint, tmp_path) == [str(change), "reload of 'reward' by a"]
    with RunWriter(tmp_path, resume_stage="main", resume_step=2) as writer:
        writer.event("resume", "from step-000002")
    assert len(read_events(tmp_path)) == 8 and changes_after(checkpoint, tmp_path) == [], "was told"


def test_values_that_would_do_nothing_or_harm_are_fixed(make_recipe) -> None:
    values = {value.name: value for value in live_values(compile_recipe(make_recipe()))}
    assert "algorithm.kl.coef is 0" in values["kl_coef"].fixed
    assert values["max_tokens"].high == 5, "what the servers and packs were sized for"
    assert not values["temperature"].fixed and not values["entropy_coef"].fixed
    assert values["max_tokens"].low == 1


def test_values_of_a_graph_have_its_bounds(make_recipe, tmp_path: Path) -> None:
    graph = SHIPPED.joinpath("dapo.yaml").read_text()
    path = tmp_path / "flow.yaml"
    path.write_text(graph.replace("function: soft_overlong", "function: soft_overlong, buffer: 3"))
    values = {v.name: v for v in live_values(compile_recipe(make_recipe(f"dataflow={path}")))}
    assert values["max_tokens"].low == 3, "the buffer lies within a response"


def test_the_kl_coefficient_waits_for_steps_that_train_the_actor(make_recipe) -> None:
    recipe = make_recipe(
        "roles.reference={colocate: actor}",
        "algorithm.kl={coef: 0.1, place: reward, adaptive: {target: 0.01, horizon: 1000}}",
    )
    state = SharedState([LiveValue("kl_coef", 0.1, 1e-6, 100.0)])
    controllers.move(state, recipe, {"reward/kl": 0.0, "critic/loss": 1.0}, 100)
    state.apply()
    assert state["kl_coef"] == 0.1, "a warm-up of the critic"
    controllers.move(state, recipe, {"reward/kl": 0.0, "update/loss": 0.0, "update/tokens": 0.0}, 9)
    state.apply()
    assert state["kl_coef"] == 0.1, "every response was masked, and no step taken"
    controllers.move(state, recipe, {"reward/kl": 1.0, "update/kl": -1.0, "update/loss": 0.5}, 100)
    state.apply()
    assert state["kl_coef"] == pytest.approx(0.1 * 1.02), "by the KL that the reward pays"


def test_lambda_waits_for_steps_that_train_the_actor() -> None:
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "quickstart_safe_rlhf.yaml")
    told = recipe.algorithm.lagrangian
    assert told is not None
    state = SharedState([LiveValue("lambda", told.start, 1e-4, 1e6)])
    for metrics in ({"critic/loss": 1.0}, {"update/loss": 0.0, "update/tokens": 0.0}):
        controllers.move(state, recipe, {"cost/mean": 9.0, **metrics}, 100)
        state.apply()
        assert state["lambda"] == told.start
    controllers.move(state, recipe, {"cost/mean": 9.0, "update/loss": 0.5}, 100)
    state.apply()
    assert state["lambda"] > told.start


@pytest.mark.slow
def test_the_kl_coefficient_moves_between_steps(make_recipe) -> None:
    """By the paper's rule on the KL that each step measured, over a restart too."""

    def run(steps: int, **options: bool) -> list[dict[str, float]]:
        recipe = make_recipe(
            *("warm_start=null", "evaluation=null", "roles.reference={colocate: actor}"),
            "algorithm.kl={coef: 0.1, adaptive: {target: 0.001, horizon: 48}}",
            *(f"steps={steps}", "checkpoint.every=2"),
        )
        launch = LaunchOptions(live=False, **options)
        folder = train(compile_recipe(recipe), lambda logs: LocalSession(), launch, SerialRunner())
        return [row["metrics"] for row in read_metrics(folder)]

    run(2)
    coef = 0.1
    for step in run(3, resume=True):
        assert step.get("state/kl_coef", 0.1) == pytest.approx(coef, rel=1e-12)
        error = min(max(step["update/kl"] / 0.001 - 1, -0.2), 0.2)
        coef *= 1 + error * 24 / 48
    assert coef != 0.1
