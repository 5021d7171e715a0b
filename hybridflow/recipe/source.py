"""YAML that remembers where each key stands.

Scalars follow YAML 1.2's core schema: ``1e-6`` is a float, ``no`` and ``on`` are strings, ``010``
is ten. A duplicate key is a fault rather than a silent overwrite.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hybridflow.recipe.faults import Fault

KeyPath = tuple[str | int, ...]
COMMAND_LINE = "command line"
MAX_VALUES = 100_000  # a recipe is a screen long; more is an alias that multiplies itself


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's reader with YAML 1.2's core schema in place of 1.1's guesses."""

    yaml_implicit_resolvers: dict[str, Any] = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )


class _CoreDumper(yaml.SafeDumper):
    """Writes what ``_CoreLoader`` reads back: a text such as ``1e-6`` is quoted."""

    yaml_implicit_resolvers = _CoreLoader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def to_yaml(data: Any) -> str:
    """Plain values as YAML, keys in their order."""
    return yaml.dump(data, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True)


def flow_yaml(data: Any) -> str:
    """Plain values as YAML on one line, as they stand behind a key."""
    flow = {"sort_keys": False, "default_flow_style": True, "width": float("inf")}
    text = yaml.dump(data, Dumper=_CoreDumper, allow_unicode=True, **flow)
    return text.removesuffix("...\n").strip()


@dataclass
class Source:
    """Plain values, the place of each one, and what is wrong with the text itself."""

    data: Any
    origins: dict[KeyPath, str]
    faults: list[Fault] = field(default_factory=list)

    def origin(self, path: KeyPath) -> str:
        """``file:line`` of a key, or of the nearest enclosing one."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins[path]


def read_yaml(path: str | Path) -> Source:
    """Read a YAML file; a text that is not YAML yields ``data=None`` and a fault."""
    file = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        fault = Fault(file, f"cannot read the file: {reason}", "give the path of a YAML file")
        return Source(None, {(): file}, [fault])
    return parse_yaml(text, file)


def parse_yaml(text: str, file: str, numbered: bool = True) -> Source:
    """Parse one YAML document; ``numbered`` adds the line to each origin."""
    source = Source(None, {(): file})
    try:
        root = yaml.compose(text, Loader=_CoreLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark and numbered else file
        problem = getattr(error, "problem", None) or getattr(error, "reason", "invalid text")
        source.faults.append(Fault(where, f"not valid YAML: {problem}", "mend the YAML syntax"))
        return source
    except RecursionError:
        source.faults.append(Fault(file, "nested too deeply", "write fewer levels"))
        return source
    if root is not None:
        source.data = _Reader(source, file, numbered).value(root, (), ())
    return source


class _Reader:
    """Turns composed nodes into values and notes the origin of every key."""

    def __init__(self, source: Source, file: str, numbered: bool) -> None:
        self._source, self._file, self._numbered = source, file, numbered
        self._count = 0

    def value(self, node: yaml.Node, path: KeyPath, open_nodes: tuple[yaml.Node, ...]) -> Any:
        self._count += 1
        if any(node is outer for outer in open_nodes) or self._count > MAX_VALUES:
            if self._count <= MAX_VALUES + 1:
                self._fault(node, "an alias repeats itself without end", "write the values out")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, (*open_nodes, node))
        if isinstance(node, yaml.SequenceNode):
            return self._sequence(node, path, (*open_nodes, node))
        return self._scalar(node)

    def _mapping(
        self, node: yaml.MappingNode, path: KeyPath, open_nodes: tuple[yaml.Node, ...]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(key_node, "a key is not a name", "use plain names as keys")
                continue
            key = key_node.value
            if key in found:
                first = self._source.origins[(*path, key)]
                self._fault(key_node, f"duplicate key '{key}' (first: {first})", "keep one of them")
                continue
            self._source.origins[(*path, key)] = self._where(key_node)
            found[key] = self.value(value_node, (*path, key), open_nodes)
        return found

    def _sequence(
        self, node: yaml.SequenceNode, path: KeyPath, open_nodes: tuple[yaml.Node, ...]
    ) -> list[Any]:
        found = []
        for index, item in enumerate(node.value):
            self._source.origins[(*path, index)] = self._where(item)
            found.append(self.value(item, (*path, index), open_nodes))
        return found

    def _scalar(self, node: yaml.Node) -> Any:
        kind, text = node.tag.removeprefix("tag:yaml.org,2002:"), node.value
        try:
            if kind == "str":
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return text.lower() == "true"
            if kind == "int":
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            if kind == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            self._fault(node, f"'{text}' is not a value of type {kind}", "write a plain value")
            return None
        self._fault(node, f"the YAML tag '{node.tag}' is not allowed", "write a plain value")
        return None

    def _where(self, node: yaml.Node) -> str:
        return f"{self._file}:{node.start_mark.line + 1}" if self._numbered else self._file

    def _fault(self, node: yaml.Node, what: str, fix: str) -> None:
        self._source.faults.append(Fault(self._where(node), what, fix))
