"""Rows that stand for different prompts or samples must not meet in one node."""

from collections.abc import Callable, Mapping

from hybridflow.recipe.axes import Axis, FieldType
from hybridflow.recipe.catalogue import GRAPH_INPUTS, Signature
from hybridflow.recipe.catalogue_fields import RESPONSES
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.graph import Graph, Node


def batch_faults(
    graph: Graph,
    signatures: Mapping[str, Signature | None],
    types: Mapping[str, FieldType],
) -> list[Fault]:
    """Nodes that mix rows of different batches, or fields of different responses."""
    checks = (_BatchCheck, _ResponseCheck)
    return [fault for check in checks for fault in check(graph, signatures, types).run()]


def _mixed(
    graph: Graph, told: Callable[[Node, str], str | None], what: str, fix: str
) -> list[Fault]:
    """Nodes with inputs of which ``told`` says different things; None: nothing to compare."""
    faults = []
    for node in graph.nodes:
        origins = {field: told(node, field) for field in node.inputs.values()}
        found = {field: origin for field, origin in origins.items() if origin is not None}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{field} ({origin})" for field, origin in found.items())
            faults.append(Fault(node.origin, f"node '{node.name}' mixes {what}: {listed}", fix))
    return faults


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
        def told(node: Node, field: str) -> str | None:
            batch = self._batch(node, field)
            return None if batch is None else _text(batch)

        fix = "take all its fields from one batch"
        return _mixed(self._graph, told, "rows of different batches", fix)

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


class _ResponseCheck:
    """Every field of samples or tokens is of the same responses: those of one node that samples, of
    one function that makes others of them, or of the data."""

    def __init__(
        self,
        graph: Graph,
        signatures: Mapping[str, Signature | None],
        types: Mapping[str, FieldType],
    ) -> None:
        self._graph, self._signatures, self._types = graph, signatures, types
        self._known: dict[str, str | None] = {}

    def run(self) -> list[Fault]:
        fix = "take all of one kind, or bring values to one per prompt with prompt_mean"
        return _mixed(
            self._graph, lambda _, field: self._origin(field), "fields of different responses", fix
        )

    def _origin(self, field: str) -> str | None:
        """Where the responses come from that the rows of ``field`` stand for."""
        kind, maker = self._types.get(field), self._graph.producers.get(field)
        if kind is None or kind.axis not in (Axis.SAMPLES, Axis.TOKENS):
            return None
        if maker is None:
            return "the data's" if field in self._graph.inputs else None
        if maker.name not in self._known:
            self._known[maker.name] = None  # ends the walk on a cycle, a fault by itself
            self._known[maker.name] = self._of_node(maker)
        return self._known[maker.name]

    def _of_node(self, node: Node) -> str | None:
        if node.call == "generate":
            way = node.options.get("sampling", "training")
            return f"sampled by '{node.name}'" + ("" if way == "training" else f", {way}")
        known = self._signatures[node.name]
        if known is not None and RESPONSES in known.outputs.values():
            return f"made by '{node.name}'"
        origins = (self._origin(name) for name in node.inputs.values())
        return next((origin for origin in origins if origin is not None), None)
