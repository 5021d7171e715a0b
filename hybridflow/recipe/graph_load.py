"""A graph from YAML: each key read once, each mistake with its line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridflow.recipe.faults import Fault, RecipeError
from hybridflow.recipe.graph import Graph, Node, Repeat
from hybridflow.recipe.graph_check import structure_faults
from hybridflow.recipe.names import hint
from hybridflow.recipe.source import KeyPath, read_yaml

Origin = Callable[[KeyPath], str]
NODE_KEYS = (
    *("role", "call", "function", "in", "out", "after", "to"),
    *("when", "every", "repeat_until", "delay"),
)


def load_graph(path: str | Path) -> Graph:
    """The graph of a YAML file; raises RecipeError with every fault of its form."""
    source = read_yaml(path)
    if source.faults:
        raise RecipeError(source.faults)
    graph, faults = parse_graph(source.data, source.origin)
    if faults or graph is None:
        raise RecipeError(faults)
    return graph


def parse_graph(data: Any, origin: Origin) -> tuple[Graph | None, list[Fault]]:
    """The graph of plain values, and its faults of form; None when it cannot be read at all."""
    reader = _GraphReader(origin)
    graph = reader.graph(data)
    if graph is not None:
        reader.faults.extend(structure_faults(graph, origin(("nodes",))))
    return graph, reader.faults


class _GraphReader:
    """Reads leniently: a wrong key becomes a fault and the rest of the node still counts."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self.faults: list[Fault] = []

    def graph(self, data: Any) -> Graph | None:
        if not isinstance(data, dict) or not isinstance(data.get("nodes"), dict):
            self._fault((), "a dataflow has no `nodes`", "write `inputs: [...]` and `nodes: {...}`")
            return None
        for key in data.keys() - {"inputs", "nodes"}:
            self._fault((key,), f"unknown key '{key}'", hint(key, ["inputs", "nodes"]))
        inputs = self._names(data.get("inputs", []), ("inputs",))
        nodes = [self._node(name, body) for name, body in data["nodes"].items()]
        return Graph(inputs, tuple(nodes))

    def _node(self, name: str, body: Any) -> Node:
        path: KeyPath = ("nodes", name)
        if not isinstance(body, dict):
            self._fault(path, f"node '{name}' is not a mapping", "write `{role: ..., call: ...}`")
            body = {}
        return Node(
            name,
            role=self._text(body, "role", path),
            call=self._text(body, "call", path),
            function=self._text(body, "function", path),
            inputs=self._fields(body.get("in", []), (*path, "in")),
            outputs=self._fields(body.get("out", []), (*path, "out")),
            after=self._names(body.get("after", []), (*path, "after")),
            to=self._text(body, "to", path),
            when=self._text(body, "when", path),
            every=self._every(body.get("every"), (*path, "every")),
            repeat_until=self._repeat(body.get("repeat_until"), (*path, "repeat_until")),
            delay=self._delay(body.get("delay", {}), (*path, "delay")),
            options={key: value for key, value in body.items() if key not in NODE_KEYS},
            origin=self._origin(path),
        )

    def _text(self, body: dict[str, Any], key: str, path: KeyPath) -> str | None:
        value = body.get(key)
        if key in body and not isinstance(value, str):
            self._fault((*path, key), f"`{key}` is {value!r}", f"give `{key}` a name")
            return None
        return value

    def _names(self, value: Any, path: KeyPath) -> tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return tuple(value)
        self._fault(
            path, f"`{path[-1]}` is not a list of names", f"write `{path[-1]}: [name, ...]`"
        )
        return ()

    def _fields(self, value: Any, path: KeyPath) -> dict[str, str]:
        if not isinstance(value, list):
            self._fault(path, f"`{path[-1]}` is not a list", "write `[field, {parameter: field}]`")
            return {}
        found: dict[str, str] = {}
        for index, entry in enumerate(value):
            pairs = {entry: entry} if isinstance(entry, str) else entry
            well_formed = isinstance(pairs, dict) and all(
                isinstance(field, str) for field in pairs.values()
            )
            if not well_formed:
                self._fault((*path, index), f"{entry!r} is no field", "write `parameter: field`")
                continue
            for parameter in pairs.keys() & found.keys():
                self._fault((*path, index), f"'{parameter}' is listed twice", "keep one of them")
            found.update(pairs)
        return found

    def _every(self, value: Any, path: KeyPath) -> int | str | None:
        if value is None or isinstance(value, str) or (type(value) is int and value > 0):
            return value
        self._fault(path, f"`every` is {value!r}", "give a number of steps, at least 1")
        return None

    def _repeat(self, value: Any, path: KeyPath) -> Repeat | None:
        if value is None:
            return None
        keys = {"condition": str, "from": str, "cap": int}
        if (
            isinstance(value, dict)
            and value.keys() == keys.keys()
            and all(type(value[key]) is kind for key, kind in keys.items())
            and value["cap"] > 0
        ):
            return Repeat(value["condition"], value["from"], value["cap"])
        what = "`repeat_until` takes exactly `condition`, `from` and `cap`"
        self._fault(path, what, "write `{condition: FIELD, from: NODE, cap: N}`, N at least 1")
        return None

    def _delay(self, value: Any, path: KeyPath) -> dict[str, int]:
        if isinstance(value, dict) and all(type(n) is int and n > 0 for n in value.values()):
            return value
        self._fault(path, "`delay` is not `{field: steps}`", "give each field at least 1 step")
        return {}

    def _fault(self, path: KeyPath, what: str, fix: str) -> None:
        self.faults.append(Fault(self._origin(path), what, fix))
