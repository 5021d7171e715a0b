"""Rewards of several nodes and roles keep metrics of their own."""

import json
import math
from pathlib import Path
from typing import cast

import pytest
import torch

from hybridflow.algorithms import FUNCTIONS, FunctionContext
from hybridflow.batch import Batch, Ragged
from hybridflow.dataflow.feed import Feed
from hybridflow.dataflow.fields import Fields, Value
from hybridflow.dataflow.measures import advantage_metrics, reference_kl, source_means
from hybridflow.dataflow.observer import Observer
from hybridflow.dataflow.rounds import reward_metrics
from hybridflow.dataflow.runner import SerialRunner
from hybridflow.dataflow.steps import StepContext, StepOutcome, StepRunner
from hybridflow.dataflow.utilisation import Utilisation
from hybridflow.recipe.axes import Axis
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.flops import ModelFlops, Work
from hybridflow.recipe.graph import Graph, Node, fields
from hybridflow.recipe.load import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
VALUES = {
    "rewards": 1.0,
    "costs": 0.25,
    "greedy_rewards": 0.5,
    "eval_rewards": 0.75,
    "eval_costs": 0.125,
}
ROWS = [{"answer": "1", "source": "easy"}, {"answer": "2", "source": "hard"}]


def metrics_of(name: str) -> dict[str, float]:
    """Of a step whose scores are ``VALUES``; each training sample of ``rewards`` failed."""
    plan = compile_recipe(load_recipe(RECIPES / f"{name}.yaml"))
    graph = plan.stages[-1].graph
    observer = Observer(graph, plan.recipe.roles.kinds(), lambda rows: [], "source")
    outcome = StepOutcome(StepContext("main", 1, 1, 1), Fields())
    for inputs in ("answers", "eval_answers"):
        outcome.fields.put(inputs, Value(Axis.PROMPTS, ROWS, 2))
    for node in (node for node in graph.nodes if node.call == "score"):
        rewards_S = torch.full((2,), VALUES[node.outputs["rewards"]])
        failed_S = torch.full((2,), int(node.name == "score"), dtype=torch.int8)
        fields = {"rewards": rewards_S, f"failed:{node.role}": failed_S}
        result = Batch(fields, dict.fromkeys(fields, Axis.SAMPLES), 2, 1)
        outcome.results[node.name] = result
        outcome.fields.store(node.outputs, result)
    return observer.metrics(outcome, None)


@pytest.mark.parametrize(
    ("recipe", "further", "name"),
    [("quickstart_safe_rlhf", 0.25, "costs"), ("quickstart_remax", 0.5, "greedy_rewards")],
)
def test_a_further_reward_does_not_take_the_names_of_the_main_one(recipe, further, name) -> None:
    found = metrics_of(recipe)
    assert found["reward/mean"] == found["reward/source/easy"] == found["reward/source/hard"] == 1
    assert found[f"reward/{name}/source/easy"] == found[f"reward/{name}/mean"] == further
    assert found["eval/reward"] == found["eval/reward/source/easy"] == 0.75
    assert found["reward/reward/errors"] == 2, "those of the samples that are trained on"
    for key in ("eval/cost", "eval/cost/source/hard"):
        assert found.get(key) == (0.125 if name == "costs" else None)
    other = "reward/cost/errors" if name == "costs" else "reward/reward/greedy_rewards/errors"
    assert found[other] == 0
    assert found["reward/constant"] == 1
    # The same function scores greedy responses, which may well all be right or wrong.
    assert found.get(f"reward/{name}/constant") == (1 if name == "costs" else None)


def test_two_updates_of_one_role_keep_metrics_of_their_own() -> None:
    """A supervised update beside PPO's, as of InstructGPT; what takes advantages comes first."""

    def update(name: str, role: str, *inputs: str) -> Node:
        fields = {field: field for field in ("prompts", "targets", *inputs)}
        return Node(name, role=role, call="update", inputs=fields, options={"loss": "any"})

    nodes = [
        update("ptx", "actor"),
        update("policy", "actor", "advantages"),
        update("critic", "critic"),
        Node("held", role="actor", call="evaluate", inputs={"prompts": "prompts"}),
        Node("out", role="actor", call="evaluate", inputs={"prompts": "prompts"}),
    ]
    graph = Graph(("prompts", "targets"), tuple(nodes))
    kinds = {"actor": "model", "critic": "value"}
    observer = Observer(graph, kinds, lambda rows: [])
    outcome = StepOutcome(StepContext("main", 1, 1, 1), Fields())
    for number, node in enumerate(nodes):
        outcome.results[node.name] = Batch(
            {"metrics": {"loss": float(number)}}, {"metrics": Axis.RUN}
        )
        outcome.timings.add(node.name, 10.0 + number)
    found = observer.metrics(outcome, None)
    assert found["update/loss"] == 1 and found["update/seconds"] == 11, "what the rewards teach"
    assert found["update/ptx/loss"] == 0 and found["update/ptx/seconds"] == 10
    assert found["critic/loss"] == 2
    assert (found["eval/loss"], found["eval/out/loss"]) == (3, 4)


def test_the_kl_that_a_function_charges_is_k3_of_the_policy_from_the_reference() -> None:
    """By hand: exp(d) - 1 - d with d = ref - policy, in nats a token."""
    inputs = {"logprobs": "mine", "ref_logprobs": "theirs"}
    node = Node("charge", function="token_rewards", inputs=inputs, outputs={"token_rewards": "r"})
    outcome = StepOutcome(StepContext("main", 1, 1, 1), Fields())
    outcome.results["charge"] = Batch({}, {}, 1, 2)
    for name, rows in (("mine", [[-1.0, -2.0], [-0.5]]), ("theirs", [[-1.5, -1.0], [-0.5]])):
        outcome.fields.put(name, Value(Axis.TOKENS, Ragged.from_rows(rows, torch.float32), 1, 2))
    expected = ((math.exp(-0.5) - 0.5) + (math.e - 2) + 0) / 3
    found = reference_kl(Graph((), (node,)), outcome)
    assert found == {"reward/kl": pytest.approx(expected, rel=1e-6)}


def test_utilisation_counts_every_epoch_over_all_devices(make_recipe) -> None:
    told = ("roles.actor.epochs=3", "roles.actor.parallel={dp: 2}", "cluster.peak_tflops=2")
    plan = compile_recipe(make_recipe(*told))
    stage = plan.stages[-1]
    (node,) = (n for n in stage.graph.nodes if (n.role, n.call) == ("actor", "update"))
    outcome = StepOutcome(StepContext("main", 1, 1, 1), Fields())
    rows = {"prompts": [[3, 4]], "responses": [[5], [6, 7]]}
    for name, ids in rows.items():
        value = Value(Axis.TOKENS, Ragged.from_rows(ids, torch.int64), 1, 2)
        outcome.fields.put(node.inputs[name], value)
    outcome.results[node.name] = Batch({}, {}, 1, 2)
    outcome.timings.add(node.name, 0.5)
    found = Utilisation(plan, stage, "actor", "cpu").metrics(outcome)
    config = json.loads((Path(plan.recipe.model.path) / "config.json").read_text())
    once = ModelFlops(config, config["vocab_size"]).training(Work.of([2], [1, 2]))
    assert found["throughput/update_tflops"] == pytest.approx(3 * once / 0.5 / 2 / 1e12)
    assert found["throughput/mfu"] == pytest.approx(3 * once / 0.5 / 2 / 2e12)


def test_what_advantages_are_like() -> None:
    node = Node("update", role="actor", call="update", inputs={"advantages": "gain"})
    outcome = StepOutcome(StepContext("main", 1, 1, 1), Fields())
    outcome.fields.put("gain", Value(Axis.SAMPLES, torch.tensor([-3.0, 0.0, 0.0, 1.0]), 2, 2))
    found = advantage_metrics(node, outcome)
    assert found == pytest.approx(
        {
            "advantage/mean": -0.5,
            "advantage/std": 1.5,
            "advantage/min": -3,
            "advantage/max": 1,
            "advantage/abs_mean": 1,
            "advantage/zero_share": 0.5,
        }
    )


def test_means_are_between_the_least_and_the_largest() -> None:
    for value in (0.8, 3e38):
        found = reward_metrics(torch.full((24,), value))
        assert found["reward/min"] == found["reward/mean"] == found["reward/max"]
        assert found["reward/std"] == 0


def sampled(rewards_PG: list[list[float]], length: int, finished: bool) -> Batch:
    """What DAPO's loop makes of two samples a prompt."""
    rewards_S = torch.tensor(rewards_PG).flatten()
    samples = len(rewards_S)
    responses = Ragged.from_rows([torch.full((length,), 7)] * samples)
    fields = {
        "responses": responses,
        "rollout_logprobs": responses.with_values(torch.zeros(samples * length)),
        "token_versions": responses.with_values(torch.zeros(samples * length, dtype=torch.int64)),
        "finished": torch.full((samples,), finished),
        "versions": torch.zeros(samples, dtype=torch.int64),
        "rewards": rewards_S,
    }
    axes = {n: Axis.TOKENS if isinstance(d, Ragged) else Axis.SAMPLES for n, d in fields.items()}
    return Batch(fields, axes, len(rewards_PG), 2)


def test_dapo_reports_what_was_trained_on_and_what_was_sampled(tmp_path) -> None:
    """Two rounds of two prompts, of which one each has a signal, on the shipped graph."""
    plan = compile_recipe(load_recipe(RECIPES / "quickstart_dapo.yaml"))
    graph = plan.stages[-1].graph
    told = [
        sampled([[1.0, 1.0], [0.0, 1.0]], 2, True),
        sampled([[0.0, 1.0], [0.0, 0.0]], 4, False),
    ]
    prompts = Ragged.from_rows([[3, 4], [5]], dtype=torch.int64)

    class Drawn:
        def draw(self, inputs):
            shown = {"prompts": prompts, "answers": ROWS}
            return {name: Value(Axis.PROMPTS, data, 2) for name, data in shown.items()}

    def keep(batch, context):
        told = FunctionContext(prompts_per_step=2, previous=context.previous)
        found = FUNCTIONS["accumulate_signal"](batch, told)
        axes = {n: Axis.TOKENS if isinstance(d, Ragged) else Axis.SAMPLES for n, d in found.items()}
        axes |= {"kept_prompts": Axis.PROMPTS, "enough": Axis.RUN}
        return Batch(found, axes, len(found["kept_prompts"]), 2)

    operations = {
        "generate": lambda batch, context: told[context.round],
        "score": lambda batch, context: told[context.round].select(["rewards"]),
        "keep": keep,
    }
    kinds = plan.recipe.roles.kinds()
    nodes = [node for node in graph.nodes if node.name in operations]
    graph = Graph.build(["prompts", "answers"], nodes)
    runner = StepRunner(graph, operations, SerialRunner(), cast(Feed, Drawn()), kinds)
    outcome = runner.run(StepContext("main", 1, 1, 1))
    observer = Observer(graph, kinds, lambda rows: [str(row) for row in rows], "source")
    found = observer.metrics(outcome, None)
    assert found["sampling/rounds"] == 2 and found["sampling/prompts"] == 4
    assert (
        found["sampling/signal_share"] == found["reward/mean"] == found["length/truncated"] == 0.5
    )
    assert found["sampling/reward/mean"] == 0.5
    assert found["sampling/reward/source/easy"] == 0.75 and "reward/source/easy" not in found
    assert found["sampling/reward/source/hard"] == 0.25
    assert found["length/mean"] == 3 and found["length/max"] == 4 and found["length/min"] == 2
    assert found["sampling/length/truncated"] == 0.5
    rows = list(observer.rollouts(outcome))
    assert [row["reward"] for row in rows] == [1, 1, 0, 1, 0, 1, 0, 0]
    assert [row["prompt"] for row in rows[::2]] == ["[3, 4]", "[5]", "[3, 4]", "[5]"]
    assert [row["length"] for row in rows] == [2] * 4 + [4] * 4


def test_a_source_is_the_same_curve_in_every_step() -> None:
    """Forty sources, of which each step holds others: 31 names, then `other`."""
    node = Node("score", role="reward", call="score", inputs={"answers": "answers"})
    seen: list[str] = []

    def step(names: list[str]) -> dict[str, float]:
        outcome = StepOutcome(StepContext("main", 1, 1, 1), Fields())
        rows = [{"answer": "", "source": name} for name in names]
        outcome.fields.put("answers", Value(Axis.PROMPTS, rows, len(rows)))
        rewards = {"rewards": torch.arange(float(len(rows)))}
        outcome.results["score"] = Batch(rewards, {"rewards": Axis.SAMPLES}, len(rows), 1)
        return source_means(node, outcome, "source", "reward", seen)

    names = [f"s{n:02}" for n in range(40)]
    assert set(step(names[10:30])) == {f"reward/source/{name}" for name in names[10:30]}
    found = step(names)
    assert set(found) == {f"reward/source/{n}" for n in (*names[:31], "other")}
    assert (
        found["reward/source/other"] == sum(range(31, 40)) / 9 and found["reward/source/s12"] == 12
    )
    assert set(step(names[38:])) == {"reward/source/other"}


def test_a_rollout_shows_the_reward_that_is_trained_on() -> None:
    """Two rewards are weighed: neither of them is what advantages are made of."""
    nodes = [
        Node("generate", role="rollout", call="generate", inputs={"prompts": "prompts"},
             outputs={"responses": "responses"}),
        *(Node(name, role=name, call="score", inputs=fields("prompts", "answers", "responses"),
               outputs={"rewards": name}) for name in ("right", "brief")),
        Node("both", function="weighted_sum", inputs={"first": "right", "second": "brief"},
             outputs={"total": "total"}),
        Node("advantage", function="group_relative", inputs={"rewards": "total"},
             outputs={"advantages": "advantages"}),
    ]  # fmt: skip
    graph = Graph.build(["prompts", "answers"], nodes)
    outcome = StepOutcome(StepContext("main", 1, 1, 1), Fields())
    rows = Ragged.from_rows([[5], [6]], torch.int64)
    outcome.fields.put("prompts", Value(Axis.PROMPTS, rows[:1], 1))
    outcome.fields.put("answers", Value(Axis.PROMPTS, [{"answer": "5"}], 1))
    flags, zeros = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    axes = dict.fromkeys(("finished", "versions"), Axis.SAMPLES) | {"responses": Axis.TOKENS}
    sampled = {"responses": rows, "finished": flags, "versions": zeros}
    outcome.results["generate"] = Batch(sampled, axes, 1, 2)
    for name, values in (("right", [1.0, 0.0]), ("brief", [0.0, 0.5])):
        scores = torch.tensor(values)
        outcome.results[name] = Batch({"rewards": scores}, {"rewards": Axis.SAMPLES}, 1, 2)
    outcome.fields.put("total", Value(Axis.SAMPLES, torch.tensor([1.0, 0.05]), 1, 2))
    kinds = {"rollout": "rollout", "right": "reward", "brief": "reward"}
    observer = Observer(graph, kinds, lambda rows: [str(row) for row in rows])
    first, second = observer.rollouts(outcome)
    assert first["reward"] == 1.0 and second["reward"] == pytest.approx(0.05)
    assert second["rewards"] == {"right": 0.0, "brief": 0.5}
