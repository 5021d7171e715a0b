"""One step of a stage: which nodes run, in what rounds, and what they leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.batch import Batch
from hybridflow.dataflow.feed import Feed
from hybridflow.dataflow.fields import Fields, Value
from hybridflow.dataflow.runner import NodeError, Runner, Timings, timed
from hybridflow.recipe.catalogue import signature
from hybridflow.recipe.graph import Graph, Node


@dataclass(frozen=True)
class StepContext:
    """What an operation may know beside its batch.

    Attributes:
        step: of the stage, counted from 1.
        global_step: over all stages, counted from 1.
        round: of a ``repeat_until``, counted from 0.
        previous: a repeated node's own outputs of the round before, those too that the graph does
            not name.
    """

    stage: str
    step: int
    steps: int
    global_step: int
    round: int = 0
    previous: Mapping[str, Any] | None = None


Operation = Callable[[Batch, StepContext], Batch]


@dataclass
class StepOutcome:
    """What a step leaves.

    Attributes:
        fields: every field of the graph by its name.
        results: every node's whole result by the node's name, fields that the graph does not
            name included.
        timings: seconds of every node.
        rounds: of a ``repeat_until``, each with the fields as it left them and the results of the
            nodes that are run again; none in other steps.
    """

    context: StepContext
    fields: Fields
    results: dict[str, Batch] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)
    rounds: list[StepOutcome] = field(default_factory=list)


class StepRunner:
    """Runs the steps of one stage.

    ``kinds`` gives each role's kind. Nodes that the recipe switches off are not in the graph.
    """

    def __init__(
        self,
        graph: Graph,
        operations: Mapping[str, Operation],
        runner: Runner,
        feed: Feed,
        kinds: Mapping[str, Any],
    ) -> None:
        self._graph = graph
        self._operations = operations
        self._runner = runner
        self._feed = feed
        self._kinds = kinds
        depth = max((n for node in graph.nodes for n in node.delay.values()), default=0)
        self._history: deque[Fields] = deque(maxlen=depth) if depth else deque(maxlen=0)

    def run(self, context: StepContext) -> StepOutcome:
        """Draw the step's rows and run every node that is due."""
        outcome = StepOutcome(context, Fields())
        self._draw(outcome.fields)
        due = self._due(context, outcome.fields)
        repeated = {name for node in due for name in self._graph.loop(node)}
        before = [node for node in due if node.name not in repeated]
        loops = [node for node in due if node.repeat_until is not None]
        if not loops:
            self._pass(due, outcome, context)
        for loop in loops:
            inner = self._graph.loop(loop)
            ready = [node for node in before if self._precedes(node, inner, due)]
            self._pass(ready, outcome, context)
            before = [node for node in before if node not in ready]
            self._repeat(loop, [node for node in due if node.name in inner], outcome)
        if loops:
            self._pass(before, outcome, context)
        self._history.append(outcome.fields)
        return outcome

    def _draw(self, fields: Fields) -> None:
        for name, value in self._feed.draw(self._graph.inputs).items():
            fields.put(name, value)

    def _due(self, context: StepContext, drawn: Fields) -> list[Node]:
        """Nodes of this step: due by ``every``, and with every needed field on its way."""
        due: list[Node] = []
        coming = set(drawn.names())
        for node in self._graph.order:
            if not node.due(context.step, context.steps):
                continue
            if all(self._delayed(f, n) is not None for f, n in node.delay.items()) and all(
                f in coming or f in node.delay for f in self._needed(node)
            ):
                due.append(node)
                coming.update(node.outputs.values())
        return due

    def _needed(self, node: Node) -> list[str]:
        kind = None if node.role is None else self._kinds[node.role]
        known = signature(kind, node.call or node.function)
        assert known is not None, f"unknown call in a checked graph: {node.action}"
        return [f for param, f in node.inputs.items() if not known.inputs[param].optional]

    def _delayed(self, name: str, steps: int) -> Value | None:
        if len(self._history) < steps or name not in self._history[-steps]:
            return None
        return self._history[-steps][name]

    def _precedes(self, node: Node, inner: frozenset[str], due: list[Node]) -> bool:
        """Whether a node of the loop waits for ``node``, directly or through others."""
        waiting = set(inner)
        for other in reversed([n for n in self._graph.order if n in due]):
            if other.name in waiting:
                waiting |= self._graph.dependencies(other)
        return node.name in waiting

    def _pass(self, nodes: list[Node], outcome: StepOutcome, context: StepContext) -> None:
        bound = {n.name: _with_context(self._operations[n.name], context) for n in nodes}
        view = _View(outcome, self._delayed)
        self._runner.run(self._graph, nodes, timed(outcome.timings, view, bound))

    def _repeat(self, node: Node, inner: list[Node], outcome: StepOutcome) -> None:
        """Rounds of the loop's nodes until its condition holds; fresh rows from the second on."""
        repeat = node.repeat_until
        assert repeat is not None
        previous = None
        for number in range(repeat.cap):
            if number:
                self._draw(outcome.fields)
            context = replace(outcome.context, round=number, previous=previous)
            self._pass(inner, outcome, context)
            outcome.rounds.append(_round(inner, outcome, context))
            if outcome.fields[repeat.condition].data:
                return
            previous = outcome.results[node.name].fields
        raise NodeError(
            node,
            ValueError(
                f"'{repeat.condition}' is still false after {repeat.cap} rounds; raise the cap, "
                "or bring data and samples from which it can come true"
            ),
        )


def _round(inner: list[Node], outcome: StepOutcome, context: StepContext) -> StepOutcome:
    results = {node.name: outcome.results[node.name] for node in inner}
    return StepOutcome(context, outcome.fields.copy(), results)


class _View:
    """The step's fields as nodes see them: delayed ones come from the steps before."""

    def __init__(self, outcome: StepOutcome, delayed: Callable[[str, int], Value | None]) -> None:
        self._outcome = outcome
        self._fields = outcome.fields
        self._delayed = delayed

    def batch_of(self, node: Node) -> Batch:
        if not node.delay:
            return self._fields.batch(node.inputs)
        seen = Fields()
        for name in node.inputs.values():
            steps = node.delay.get(name)
            value = self._delayed(name, steps) if steps else None
            if value is None and name in self._fields:
                value = self._fields[name]
            if value is not None:
                seen.put(name, value)
        return seen.batch(node.inputs)

    def keep(self, node: Node, result: Batch) -> None:
        self._outcome.results[node.name] = result
        self._fields.store(node.outputs, result)


def _with_context(operation: Operation, context: StepContext) -> Callable[[Batch], Batch]:
    return lambda batch: operation(batch, context)
