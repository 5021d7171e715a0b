"""Rows that stand for different prompts or samples must not meet in one node."""

from collections.abc import Mapping

from hybridflow.recipe.axes import Axis, FieldType
from hybridflow.recipe.catalogue import GRAPH_INPUTS, Signature
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.graph import Graph, Node


def batch_faults(
    graph: Graph,
    signatures: Mapping[str, Signature | None],
    types: Mapping[str, FieldType],
) -> list[Fault]:
    """Nodes that mix rows of different batches, or samples that were drawn in different ways."""
    return _BatchCheck(graph, signatures, types).run() + _SamplingCheck(graph, types).run()


class _BatchCheck:
    """Every field with rows belongs to one batch: whose rows, and from how many steps before.

    Rows of different batches do not stand for the same prompts.
    """

    def __init__(
        self,
        graph: Graph,
        signatures: Mapping[str, Signature | None],
        types: Mapping[str, FieldType],
    ) -> None:
        self._graph, self._signatures, self._types = graph, signatures, types
        self._known: dict[str, tuple[str, int] | None] = {}

    def run(self) -> list[Fault]:
        faults = []
        for node in self._graph.nodes:
            batches = {field: self._batch(node, field) for field in node.inputs.values()}
            found = {field: batch for field, batch in batches.items() if batch is not None}
            if len(set(found.values())) > 1:
                listed = ", ".join(f"{field} ({_text(b)})" for field, b in found.items())
                what = f"node '{node.name}' mixes rows of different batches: {listed}"
                faults.append(Fault(node.origin, what, "take all its fields from one batch"))
        return faults

    def _batch(self, reader: Node, field: str) -> tuple[str, int] | None:
        kind = self._types.get(field)
        if kind is not None and kind.axis is Axis.RUN:
            return None
        if field in GRAPH_INPUTS and field in self._graph.inputs:
            batch = (GRAPH_INPUTS[field].batch, 0)
        elif field in self._graph.producers:
            batch = self._of_node(self._graph.producers[field])
        else:
            return None
        return batch and (batch[0], batch[1] + reader.delay.get(field, 0))

    def _of_node(self, node: Node) -> tuple[str, int] | None:
        if node.name in self._known:
            return self._known[node.name]
        self._known[node.name] = None  # ends the walk on a cycle, which is reported by itself
        batches = (self._batch(node, field) for field in node.inputs.values())
        batch = next((b for b in batches if b is not None), None)
        known = self._signatures[node.name]
        if batch is not None and known is not None and known.fresh_batch:
            batch = (f"kept by {node.name}", batch[1])
        self._known[node.name] = batch
        return batch


def _text(batch: tuple[str, int]) -> str:
    return batch[0] if batch[1] == 0 else f"{batch[0]}, {batch[1]} steps before"


class _SamplingCheck:
    """Every field of samples or tokens comes from one way of sampling, which decides how many
    samples a prompt has."""

    def __init__(self, graph: Graph, types: Mapping[str, FieldType]) -> None:
        self._graph, self._types = graph, types
        self._known: dict[str, str | None] = {}

    def run(self) -> list[Fault]:
        faults = []
        for node in self._graph.nodes:
            ways = {field: self._way(field) for field in node.inputs.values()}
            found = {field: way for field, way in ways.items() if way is not None}
            if len(set(found.values())) > 1:
                listed = ", ".join(f"{field} ({way})" for field, way in found.items())
                what = f"node '{node.name}' mixes samples of different sampling: {listed}"
                fix = "take all from one node, or bring values to one per prompt with prompt_mean"
                faults.append(Fault(node.origin, what, fix))
        return faults

    def _way(self, field: str) -> str | None:
        """How the samples that the rows of ``field`` stand for were drawn."""
        kind, maker = self._types.get(field), self._graph.producers.get(field)
        if kind is None or maker is None or kind.axis not in (Axis.SAMPLES, Axis.TOKENS):
            return None
        if maker.call == "generate":
            return str(maker.options.get("sampling", "training"))
        if maker.name not in self._known:
            self._known[maker.name] = None  # ends the walk on a cycle, a fault by itself
            ways = (self._way(name) for name in maker.inputs.values())
            self._known[maker.name] = next((way for way in ways if way is not None), None)
        return self._known[maker.name]
