"""The dataflow of one training step: nodes, fields and who waits for whom.

The same objects come from YAML (``load_graph``) and from Python (``Graph.build``).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hybridflow.recipe.catalogue_functions import FUNCTIONS
from hybridflow.recipe.catalogue_losses import LOSSES
from hybridflow.recipe.catalogue_roles import ROLES
from hybridflow.recipe.faults import RecipeError

END = "end"


@dataclass(frozen=True)
class Repeat:
    """Run the nodes from ``start`` to this one again until ``condition`` is true.

    Attributes:
        condition: a field of this node, one bool for the run.
        start: the first node to run again, with fresh prompts.
        cap: most rounds of a step; when they are used up the run fails.
    """

    condition: str
    start: str
    cap: int


@dataclass(frozen=True)
class Node:
    """One box of the graph: a call on a role, or a function of the driver.

    Attributes:
        inputs: parameter of the signature -> field.
        outputs: output of the signature -> field.
        after: nodes to wait for although no field comes from them.
        to: the role that a ``publish`` writes to.
        when: a condition of the catalogue; the node is off where it is false.
        every: a number of steps, or ``evaluation``, ``checkpoint``, ``end``; the last step of a
            stage always counts.
        delay: field -> n: take it from n steps before; the node is skipped while there is none.
        options: further keys that the signature declares.
        origin: ``file:line`` for messages; not part of equality.
    """

    name: str
    role: str | None = None
    call: str | None = None
    function: str | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    to: str | None = None
    when: str | None = None
    every: int | str | None = None
    repeat_until: Repeat | None = None
    delay: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Aliases become the names that they stand for."""
        for key in ("role", "to"):
            if isinstance(name := getattr(self, key), str):
                object.__setattr__(self, key, ROLES.canonical(name))
        if self.function is not None:
            object.__setattr__(self, "function", FUNCTIONS.canonical(self.function))
        if isinstance(loss := self.options.get("loss"), str):
            options = {**self.options, "loss": LOSSES.canonical(loss)}
            object.__setattr__(self, "options", options)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that the node acts on; ``publish`` also acts on its target."""
        return tuple(role for role in (self.role, self.to) if role is not None)

    @property
    def action(self) -> str:
        """``actor.update`` or ``group_relative``, for people."""
        return f"{self.role}.{self.call}" if self.role else str(self.function)

    def due(self, step: int, steps: int) -> bool:
        """Whether the node runs in step ``step`` of 1..steps; sections are resolved by then."""
        if self.every is None or step == steps:
            return True
        return isinstance(self.every, int) and step % self.every == 0

    def due_count(self, first: int, steps: int) -> int:
        """In how many of the steps ``first``..``steps`` the node runs; ``first`` >= 1."""
        if first > steps:
            return 0
        if self.every is None:
            return steps - first + 1
        every = self.every if isinstance(self.every, int) else steps
        return steps // every - (first - 1) // every + (steps % every > 0)


def fields(*same: str, **renamed: str) -> dict[str, str]:
    """``fields("prompts", responses="targets")``: parameters under their own or another name."""
    return {**{name: name for name in same}, **renamed}


@dataclass(frozen=True)
class Graph:
    """Inputs that the data gives, and nodes in the order in which they are listed."""

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]

    @classmethod
    def build(cls, inputs: Iterable[str], nodes: Iterable[Node]) -> "Graph":
        """A graph from Python; raises RecipeError when it is not well formed in itself."""
        from hybridflow.recipe.graph_check import structure_faults

        graph = cls(tuple(inputs), tuple(nodes))
        if faults := structure_faults(graph):
            raise RecipeError(faults)
        return graph

    def node(self, name: str) -> Node:
        """The node of that name."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    @cached_property
    def producers(self) -> dict[str, Node]:
        """Field -> the node that puts it out."""
        return {name: node for node in self.nodes for name in node.outputs.values()}

    def is_sampled(self, name: str) -> bool:
        """Whether a field stems from a ``generate``, be it through functions; else the data bring
        it."""
        makers = {self.producers[name].name} if name in self.producers else set()
        while (
            fresh := {
                self.producers[given].name
                for maker in makers
                for given in self.node(maker).inputs.values()
                if given in self.producers
            }
            - makers
        ):
            makers |= fresh
        return any(self.node(maker).call == "generate" for maker in makers)

    def dependencies(self, node: Node) -> frozenset[str]:
        """Names of the nodes that must end before ``node`` starts.

        They are: producers of its fields (delayed ones aside), ``after``, and for every role the
        earlier listed nodes that act on it, as a role does one thing at a time in listed order. An
        order of the last kind gives way where fields or ``after`` say the opposite. A node
        that reads from within a ``repeat_until`` also waits until the repeating has ended.
        """
        return frozenset(self._edges[node.name])

    @cached_property
    def _edges(self) -> dict[str, set[str]]:
        edges = {node.name: self._explicit(node) for node in self.nodes}
        for late, node in enumerate(self.nodes):
            for earlier in self.nodes[:late]:
                if set(node.roles) & set(earlier.roles):
                    _add(edges, node.name, earlier.name)
        for repeating in self.nodes:
            inner = self.loop(repeating)
            for name in self.names:
                if name not in inner and edges[name] & inner:
                    _add(edges, name, repeating.name)
        return edges

    def explicit(self, name: str) -> set[str]:
        """Names of the nodes that the named one waits for by its fields and ``after``."""
        return self._explicit(self.node(name))

    def _explicit(self, node: Node) -> set[str]:
        taken = {f for f in node.inputs.values() if f not in node.delay and f in self.producers}
        given = {name for name in node.after if name in self._by_name}
        return {self.producers[f].name for f in taken} | given

    @cached_property
    def order(self) -> tuple[Node, ...]:
        """Nodes such that each follows its dependencies; ties keep the listed order."""
        ordered: dict[str, Node] = {}
        waiting = list(self.nodes)
        while waiting:
            ready = next((n for n in waiting if self._edges[n.name] <= ordered.keys()), None)
            if ready is None:
                raise ValueError(f"the graph has a cycle: {' -> '.join(self.cycle() or [])}")
            ordered[ready.name] = ready
            waiting.remove(ready)
        return tuple(ordered.values())

    def waves(self) -> list[list[Node]]:
        """Nodes by the earliest moment at which they can start; one wave may run at once."""
        depth: dict[str, int] = {}
        for node in self.order:
            depth[node.name] = 1 + max((depth[n] for n in self.dependencies(node)), default=-1)
        waves: list[list[Node]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
        for node in self.order:
            waves[depth[node.name]].append(node)
        return waves

    def loop(self, node: Node) -> frozenset[str]:
        """Names of the nodes that a ``repeat_until`` runs again, itself included; else empty."""
        if node.repeat_until is None or node.repeat_until.start not in self._by_name:
            return frozenset()
        explicit = {n.name: self._explicit(n) for n in self.nodes}
        before = _ancestors(explicit, node.name) | {node.name}
        start = node.repeat_until.start
        return frozenset(n for n in before if n == start or start in _ancestors(explicit, n))

    def cycle(self) -> list[str] | None:
        """Names along a cycle of fields and ``after``, the first one repeated at the end."""
        explicit = {node.name: self._explicit(node) for node in self.nodes}
        for name in self.names:
            if path := _path(explicit, name, name):
                return path
        return None


def _ancestors(edges: dict[str, set[str]], name: str) -> set[str]:
    """Everything that ``name`` waits for, directly or not."""
    found: set[str] = set()
    open_names = list(edges[name])
    while open_names:
        current = open_names.pop()
        if current not in found:
            found.add(current)
            open_names.extend(edges[current])
    return found


def _add(edges: dict[str, set[str]], name: str, earlier: str) -> None:
    """Let ``name`` wait for ``earlier`` unless that closes a cycle."""
    if name != earlier and name not in _ancestors(edges, earlier):
        edges[name].add(earlier)


def _path(edges: dict[str, set[str]], start: str, goal: str) -> list[str] | None:
    """A chain in running order from ``goal`` back to itself through ``start``, or None."""
    parents: dict[str, str] = {}
    open_names = [start]
    while open_names:
        current = open_names.pop(0)
        for earlier in sorted(edges[current]):
            if earlier == goal:
                chain = [goal, current]
                while chain[-1] != start:
                    chain.append(parents[chain[-1]])
                return chain
            if earlier not in parents:
                parents[earlier] = current
                open_names.append(earlier)
    return None
