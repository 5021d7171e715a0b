"""Both runners give the same fields; independent nodes run at once; errors name the line."""

import threading

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.dataflow.fields import Value
from hybridflow.dataflow.runner import ConcurrentRunner, NodeError, SerialRunner
from hybridflow.dataflow.steps import StepContext, StepRunner
from hybridflow.recipe.axes import Axis
from hybridflow.recipe.graph import Graph, Node, Repeat

DEADLINE = 60


class Rows:
    """A feed of numbered prompts: step s draws 10 * s, 10 * s + 1, ..."""

    def __init__(self, prompts: int = 3) -> None:
        self.prompts = prompts
        self.draws = 0

    def draw(self, inputs):
        self.draws += 1
        data = [10 * self.draws + i for i in range(self.prompts)]
        return {name: Value(Axis.PROMPTS, data, self.prompts) for name in inputs}


def scores(offset: float):
    def operation(batch: Batch, context: StepContext) -> Batch:
        data = torch.tensor([float(sum(row)) for row in zip(*batch.fields.values(), strict=True)])
        return Batch({"rewards": data + offset}, {"rewards": Axis.SAMPLES}, batch.prompts, 1)

    return operation


def total(batch: Batch, context: StepContext) -> Batch:
    data = batch["first"] + 2 * batch["second"]
    return Batch({"total": data}, {"total": Axis.SAMPLES}, batch.prompts, 1)


def reward(name: str, out: str) -> Node:
    inputs = {"prompts": "prompts", "answers": "prompts", "responses": "prompts"}
    return Node(name, role=name, call="score", inputs=inputs, outputs={"rewards": out})


def adding(**more) -> Node:
    inputs = {"first": "a", "second": "b"}
    outputs = {"total": "sum"}
    return Node("add", function="weighted_sum", inputs=inputs, outputs=outputs, **more)


KINDS = {"left": "reward", "right": "reward"}
GRAPH = Graph.build(["prompts"], [adding(), reward("right", "b"), reward("left", "a")])


def steps(runner, graph=GRAPH, operations=None, feed=None):
    operations = operations or {"left": scores(0.0), "right": scores(1.0), "add": total}
    return StepRunner(graph, operations, runner, feed or Rows(), KINDS)


def run(runner: StepRunner, step: int = 1, of: int = 10):
    return runner.run(StepContext("main", step, of, step))


@pytest.mark.parametrize("runner", [SerialRunner, ConcurrentRunner])
def test_nodes_run_after_what_they_read(runner) -> None:
    outcome = run(steps(runner()))
    assert outcome.fields["sum"].data.tolist() == [92.0, 101.0, 110.0]
    assert set(outcome.timings.seconds) == {"left", "right", "add"}


def test_independent_nodes_run_at_once() -> None:
    meeting = threading.Barrier(2, timeout=DEADLINE)

    def meet(batch, context):
        meeting.wait()  # breaks unless the other node runs as well
        return scores(0.0)(batch, context)

    run(steps(ConcurrentRunner(), operations={"left": meet, "right": meet, "add": total}))


@pytest.mark.parametrize("runner", [SerialRunner, ConcurrentRunner])
def test_an_error_names_node_and_line_and_stops_the_step(runner) -> None:
    reached = []

    def fail(batch, context):
        raise ValueError("no such thing")

    def note(batch, context):
        reached.append(1)
        return total(batch, context)

    graph = Graph.build(
        ["prompts"],
        [
            Node(
                "left",
                role="left",
                call="score",
                inputs=GRAPH.node("left").inputs,
                outputs={"rewards": "a"},
                origin="my.yaml:7",
            ),
            reward("right", "b"),
            adding(),
        ],
    )
    with pytest.raises(NodeError, match=r"node 'left' \(my.yaml:7\) failed: no such thing"):
        run(steps(runner(), graph, {"left": fail, "right": scores(0.0), "add": note}))
    assert not reached


def test_every_end_and_numbers() -> None:
    graph = Graph.build(["prompts"], [reward("left", "a"), reward("right", "b"), adding(every=2)])
    runner = steps(SerialRunner(), graph)
    ran = ["add" in run(runner, step, of=5).results for step in range(1, 6)]
    assert ran == [False, True, False, True, True], "every second step, and the last"
    graph = Graph.build(
        ["prompts"], [reward("left", "a"), reward("right", "b"), adding(every="end")]
    )
    runner = steps(SerialRunner(), graph)
    assert ["add" in run(runner, step, of=3).results for step in (1, 2, 3)] == [False, False, True]


def test_a_delayed_edge_takes_the_field_of_an_earlier_step() -> None:
    graph = Graph.build(
        ["prompts"], [reward("left", "a"), reward("right", "b"), adding(delay={"b": 1})]
    )
    runner = steps(ConcurrentRunner(), graph)
    assert "add" not in run(runner, 1).results, "there is no earlier step"
    outcome = run(runner, 2)
    now, before = 3 * 20.0, 3 * 10.0 + 1
    assert outcome.fields["sum"].data[0] == now + 2 * before


def test_an_edge_delayed_by_two_steps_takes_the_field_of_two_steps_before() -> None:
    graph = Graph.build(
        ["prompts"], [reward("left", "a"), reward("right", "b"), adding(delay={"b": 2})]
    )
    runner = steps(SerialRunner(), graph)
    outcomes = [run(runner, step) for step in (1, 2, 3)]
    assert ["add" in outcome.results for outcome in outcomes] == [False, False, True]
    assert outcomes[2].fields["sum"].data[0] == 3 * 30.0 + 2 * (3 * 10.0 + 1)


def test_repeat_draws_fresh_rows_until_the_condition_holds() -> None:
    node = Node(
        "keep",
        function="accumulate_signal",
        inputs=dict.fromkeys(("prompts", "responses", "rollout_logprobs", "rewards"), "a"),
        outputs={"kept_rewards": "kept", "enough": "enough"},
        repeat_until=Repeat("enough", start="left", cap=3),
    )
    seen = []

    def keep(batch, context):
        before = [] if context.previous is None else context.previous["kept_rewards"]
        kept = [*before, *batch["rewards"].tolist()]
        seen.append((context.round, len(kept)))
        data = {"kept_rewards": kept, "enough": len(kept) >= 6}
        return Batch(data, {"kept_rewards": Axis.PROMPTS, "enough": Axis.RUN}, len(kept))

    graph = Graph.build(["prompts"], [reward("left", "a"), node])
    operations = {"left": scores(0.0), "keep": keep}
    feed = Rows()
    outcome = run(steps(SerialRunner(), graph, operations, feed))
    assert seen == [(0, 3), (1, 6)] and feed.draws == 2
    assert outcome.fields["kept"].data == [30.0, 33.0, 36.0, 60.0, 63.0, 66.0]
    rounds = [(r.context.round, r.fields["a"].data[0], list(r.results)) for r in outcome.rounds]
    assert rounds == [(0, 30.0, ["left", "keep"]), (1, 60.0, ["left", "keep"])]
    with pytest.raises(NodeError, match="'enough' is still false after 3 rounds; raise the cap"):
        run(steps(SerialRunner(), graph, operations, Rows(prompts=1)))
