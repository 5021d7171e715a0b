"""From a dataflow to the nodes that run under a recipe: conditions, sections, absent inputs."""

from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.recipe.catalogue import RoleKind, signature
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.graph import END, Graph, Node
from hybridflow.recipe.graph_load import parse_graph
from hybridflow.recipe.names import advice
from hybridflow.recipe.ranges import is_graph_file
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.source import KeyPath, read_yaml

SHIPPED = Path(__file__).parent / "dataflows"


def shipped() -> list[str]:
    """Names of the dataflows that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def read_dataflow(recipe: Recipe, key: KeyPath, value: Any) -> tuple[Graph | None, list[Fault]]:
    """The graph that ``value`` (a name, a path or a mapping at ``key``) stands for."""
    if isinstance(value, dict):
        return parse_graph(value, lambda path: recipe.origin_of((*key, *path)))
    where = recipe.origin_of(key)
    is_path = is_graph_file(value)
    path = Path(value) if is_path else SHIPPED / f"{value}.yaml"
    if not is_path and value not in shipped():
        fix = f"{advice(value, shipped())} A path ends in .yaml"
        return None, [Fault(where, f"no dataflow is named '{value}'", fix)]
    if not path.is_file():
        fault = Fault(where, f"there is no dataflow file {path}", "mend the path")
        return None, [fault]
    source = read_yaml(path)
    if source.faults:
        return None, source.faults
    return parse_graph(source.data, source.origin)


def activate(
    graph: Graph,
    conditions: Mapping[str, bool],
    sections: Mapping[str, int | None],
    absent: Set[str] = frozenset(),
) -> tuple[Graph, dict[str, str]]:
    """The graph without nodes that are off; ``every`` becomes a number or stays ``end``.

    Args:
        conditions: of the catalogue, and whether each holds.
        sections: steps between runs for each word of ``every``; None switches its nodes off.
        absent: fields that their node does not give under the recipe.

    Returns:
        The graph, in which inputs that nothing produces any more are left out, and the nodes that
        are off with the reason.
    """
    off = {
        node.name: reason for node in graph.nodes if (reason := _off(node, conditions, sections))
    }
    gone = absent | {f for name in off for f in graph.node(name).outputs.values()}
    nodes = [
        _rewired(graph, node, off, sections, gone) for node in graph.nodes if node.name not in off
    ]
    consumed = {field for node in nodes for field in node.inputs.values()}
    inputs = tuple(name for name in graph.inputs if name in consumed)
    return Graph(inputs, tuple(nodes)), off


def _off(
    node: Node, conditions: Mapping[str, bool], sections: Mapping[str, int | None]
) -> str | None:
    if node.when is not None and not conditions.get(node.when, True):
        return f"when: {node.when}"
    if isinstance(node.every, str) and node.every != END and sections.get(node.every, 1) is None:
        return f"every: {node.every}"
    return None


def _rewired(
    graph: Graph,
    node: Node,
    off: Mapping[str, str],
    sections: Mapping[str, int | None],
    gone: Set[str],
) -> Node:
    inputs = {parameter: field for parameter, field in node.inputs.items() if field not in gone}
    every = sections.get(node.every) if isinstance(node.every, str) else node.every
    return replace(
        node,
        inputs=inputs,
        outputs={output: field for output, field in node.outputs.items() if field not in gone},
        delay={field: steps for field, steps in node.delay.items() if field in inputs.values()},
        after=tuple(dict.fromkeys(_awake(graph, node.after, off))),
        every=END if node.every == END else every,
    )


def _awake(graph: Graph, names: tuple[str, ...], off: Mapping[str, str]) -> list[str]:
    """``names`` where a node that is off is replaced by those that it would have waited for."""
    found = []
    for name in names:
        if name not in off:
            found.append(name)
        else:
            found.extend(_awake(graph, tuple(sorted(graph.explicit(name))), off))
    return found


def activation_faults(
    graph: Graph,
    off: Mapping[str, str],
    kinds: Mapping[str, RoleKind],
    absent: Set[str] = frozenset(),
) -> list[Fault]:
    """Required inputs whose producer is off, does not give them (``absent``), or does not run as
    often as their consumer."""
    faults = []
    for node in graph.nodes:
        if node.name in off:
            continue
        kind = kinds.get(node.role) if node.role else None
        known = signature(kind, node.call or node.function)
        for parameter, field in node.inputs.items():
            producer = graph.producers.get(field)
            takes = known.inputs.get(parameter) if known else None
            if producer is None or takes is None:
                continue
            what = f"node '{node.name}' needs '{field}' of node '{producer.name}', which"
            if producer.name in off and not takes.optional:
                reason = off[producer.name]
                fix = f"give '{node.name}' the same `{reason}`, or switch '{producer.name}' on"
                faults.append(Fault(node.origin, f"{what} is off ({reason})", fix))
            elif field in absent and not takes.optional:
                what = f"node '{node.name}' needs the token rewards '{field}', but "
                what += f"'{producer.role}' scores whole responses"
                fix = f"set roles.{producer.role}.level to token, or take `rewards`"
                if kinds.get(str(producer.role)) != "reward":
                    fix = "take `rewards`"
                faults.append(Fault(node.origin, what, fix))
            elif producer.every is not None and producer.every != node.every:
                fix = f"give '{node.name}' `every: {producer.every}` too"
                faults.append(Fault(node.origin, f"{what} runs every {producer.every} only", fix))
    return faults
