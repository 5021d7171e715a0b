"""What is wrong with a graph: its structure, then its types against the catalogue."""

from collections.abc import Collection, Iterable, Iterator, Mapping

from hybridflow.recipe.axes import Axis
from hybridflow.recipe.catalogue import (
    CONDITIONS,
    FUNCTIONS,
    GRAPH_INPUTS,
    SECTIONS,
    RoleKind,
    Signature,
    calls_of,
    signature,
)
from hybridflow.recipe.catalogue_roles import ROLES
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.graph import Graph, Node
from hybridflow.recipe.graph_batches import batch_faults
from hybridflow.recipe.names import hint
from hybridflow.recipe.registry import Registry
from hybridflow.recipe.signature import MEGATRON_KINDS

PUBLISHED_ROLE = "actor"


def structure_faults(graph: Graph, origin: str = "") -> list[Fault]:
    """Faults that need no recipe: names, producers, conditions, cycles.

    Args:
        origin: of the graph, where no node tells its own.
    """
    faults = [*_input_faults(graph, origin), *_producer_faults(graph)]
    for node in graph.nodes:
        faults.extend(_node_faults(graph, node))
        faults.extend(_repeat_faults(graph, node))
    if cycle := graph.cycle():
        where = graph.node(cycle[0]).origin
        faults.append(
            Fault(
                where,
                f"the nodes form a cycle: {' -> '.join(cycle)}",
                "cut one edge of it, or `delay` it",
            )
        )
    return faults


def _input_faults(graph: Graph, origin: str) -> Iterator[Fault]:
    where = graph.nodes[0].origin if graph.nodes else origin
    if not graph.nodes:
        yield Fault(where, "the dataflow has no nodes", "add nodes")
    for name in graph.inputs:
        if name not in GRAPH_INPUTS:
            yield Fault(where, f"the data gives no input '{name}'", hint(name, GRAPH_INPUTS))


def _producer_faults(graph: Graph) -> Iterator[Fault]:
    makers = dict.fromkeys(graph.inputs, "the inputs")
    seen: set[str] = set()
    for node in graph.nodes:
        if node.name in seen:
            yield Fault(node.origin, f"two nodes are named '{node.name}'", "rename one of them")
        seen.add(node.name)
        for name in node.outputs.values():
            if name in makers:
                what = f"node '{node.name}' puts out '{name}', which {makers[name]} already gives"
                yield Fault(node.origin, what, "rename it: `out: [{output: other_name}]`")
            makers.setdefault(name, f"node '{node.name}'")


def _node_faults(graph: Graph, node: Node) -> Iterator[Fault]:
    name, where = node.name, node.origin
    if (node.role is None) == (node.function is None) or (node.role is None) != (node.call is None):
        what = f"node '{name}' is neither a call of a role nor a function"
        yield Fault(where, what, "give it `role` and `call`, or `function` alone")
    available = [*graph.inputs, *graph.producers]
    for field in node.inputs.values():
        if field not in available:
            what = f"node '{name}' consumes '{field}', which nothing produces"
            yield Fault(where, what, hint(field, available))
    for other in node.after:
        if other not in graph.names:
            what = f"node '{name}' comes after '{other}', which is no node"
            yield Fault(where, what, hint(other, graph.names))
    for field in node.delay.keys() - set(node.inputs.values()):
        what = f"node '{name}' delays '{field}', which it does not consume"
        yield Fault(where, what, hint(field, node.inputs.values()))
    if node.when is not None and node.when not in CONDITIONS:
        what = f"node '{name}' has an unknown condition '{node.when}'"
        yield Fault(where, what, hint(node.when, CONDITIONS))
    if isinstance(node.every, str) and node.every not in SECTIONS:
        what = f"node '{name}' runs every '{node.every}', which is no section"
        yield Fault(where, what, f"{hint(node.every, SECTIONS)} or give a number of steps")


def _repeat_faults(graph: Graph, node: Node) -> Iterator[Fault]:
    repeat = node.repeat_until
    if repeat is None:
        return
    if repeat.condition not in node.outputs.values():
        what = f"node '{node.name}' repeats until '{repeat.condition}', which it does not put out"
        yield Fault(node.origin, what, hint(repeat.condition, node.outputs.values()))
    if repeat.start not in graph.names:
        what = f"node '{node.name}' repeats from '{repeat.start}', which is no node"
        yield Fault(node.origin, what, hint(repeat.start, graph.names))
    elif repeat.start not in graph.loop(node):
        what = f"node '{node.name}' repeats from '{repeat.start}', from which nothing reaches it"
        yield Fault(node.origin, what, "repeat from a node whose fields it consumes")


def type_faults(
    graph: Graph,
    kinds: Mapping[str, RoleKind],
    trained: Collection[str],
    active: Iterable[str] | None = None,
) -> list[Fault]:
    """Faults against the catalogue.

    Args:
        kinds: the recipe's roles and their kinds.
        trained: those of them that have an optimizer.
        active: nodes that are switched on; only they need their role in the recipe.
    """
    names = set(graph.names if active is None else active)
    return _TypeCheck(graph, kinds, trained, names).run()


class _TypeCheck:
    def __init__(
        self,
        graph: Graph,
        kinds: Mapping[str, RoleKind],
        trained: Collection[str],
        active: set[str],
    ) -> None:
        self._graph, self._kinds, self._trained, self._active = graph, kinds, trained, active
        self._signatures = {node.name: self._signature(node) for node in graph.nodes}
        self._types = {
            name: GRAPH_INPUTS[name].type for name in graph.inputs if name in GRAPH_INPUTS
        }
        for node in graph.nodes:
            known = self._signatures[node.name]
            outputs = known.outputs if known else {}
            self._types.update({f: outputs[o] for o, f in node.outputs.items() if o in outputs})

    def run(self) -> list[Fault]:
        faults: list[Fault] = []
        for node in self._graph.nodes:
            faults.extend(self._action_faults(node))
            known = self._signatures[node.name]
            if known is not None:
                faults.extend(self._trained_role_faults(node, known))
                faults.extend(_option_faults(node, known))
                faults.extend(self._input_faults(node, known))
                faults.extend(_output_faults(node, known))
                faults.extend(self._repeat_faults(node, known))
        return faults + batch_faults(self._graph, self._signatures, self._types)

    def _signature(self, node: Node) -> Signature | None:
        if node.role is None:
            return signature(None, node.function)
        named = ROLES[node.role].kind if node.role in ROLES else None
        kind = self._meant(node.role) or named
        return signature(kind, node.call) if kind else None

    def _meant(self, role: str) -> RoleKind | None:
        """A role's kind; the other kind of model where only that one has what the graph calls."""
        kind = self._kinds.get(role)
        if kind not in MEGATRON_KINDS:
            return kind
        calls = {node.call for node in self._graph.nodes if node.role == role}
        fits: list[RoleKind] = [
            one for one in MEGATRON_KINDS if all(signature(one, call) for call in calls)
        ]
        return fits[0] if fits and kind not in fits else kind

    def _action_faults(self, node: Node) -> Iterator[Fault]:
        if node.function is not None and node.function not in FUNCTIONS:
            what = f"node '{node.name}' has an unknown function '{node.function}'"
            yield Fault(node.origin, what, FUNCTIONS.advice(node.function))
        if node.role is None or node.name not in self._active:
            return
        if node.role not in self._kinds:
            what = f"node '{node.name}' acts on the role '{node.role}', which the recipe lacks"
            others = {alias: name for alias, name in ROLES.aliases.items() if name in self._kinds}
            advice = Registry("role", self._kinds, aliases=others).advice(node.role)
            yield Fault(node.origin, what, f"{advice}. Or add it under `roles`")
        elif node.call is not None and signature(self._kinds[node.role], node.call) is None:
            yield self._call_fault(node, self._kinds[node.role])

    def _call_fault(self, node: Node, kind: RoleKind) -> Fault:
        what = f"the role '{node.role}' ({kind}) has no call '{node.call}'"
        meant = self._meant(str(node.role))
        fix = hint(str(node.call), calls_of(kind))
        if meant != kind and node.role not in ROLES:
            fix = f"set roles.{node.role}.head to {'value' if meant == 'value' else 'vocabulary'}"
        return Fault(node.origin, what, fix)

    def _trained_role_faults(self, node: Node, known: Signature) -> Iterator[Fault]:
        if known.trainable and node.role in self._kinds and node.role not in self._trained:
            what = f"node '{node.name}' would {node.call} the role '{node.role}', which is frozen"
            yield Fault(node.origin, what, f"use one of the roles {', '.join(self._trained)}")
        elif node.call == "publish" and node.role != PUBLISHED_ROLE:
            what = f"node '{node.name}' publishes the role '{node.role}'; servers sample the actor"
            yield Fault(node.origin, what, f"use role: {PUBLISHED_ROLE}")
        sends = node.call == "publish" and node.name in self._active
        if sends and self._kinds.get(node.to or "") != "rollout":
            rollouts = [role for role, kind in self._kinds.items() if kind == "rollout"]
            what = f"node '{node.name}' publishes to {node.to!r}, which is no rollout role"
            yield Fault(node.origin, what, f"add `to: {rollouts[0] if rollouts else 'rollout'}`")
        if node.call != "publish" and node.to is not None:
            yield Fault(node.origin, f"node '{node.name}' has `to`", "only `publish` takes it")

    def _input_faults(self, node: Node, known: Signature) -> Iterator[Fault]:
        for parameter, field in node.inputs.items():
            if parameter not in known.inputs:
                what = f"{node.action} has no parameter '{parameter}'"
                fix = f"{hint(parameter, known.inputs)} (write `{{parameter: field}}`)"
                yield Fault(node.origin, what, fix)
                continue
            given, wanted = self._types.get(field), known.inputs[parameter]
            if given is not None and not wanted.accepts(given):
                types = " or ".join(map(str, wanted.types))
                what = f"'{field}' is {given}, but '{parameter}' of {node.action} takes {types}"
                yield Fault(node.origin, what, self._fitting(wanted))
        for parameter, wanted in known.inputs.items():
            if not wanted.optional and parameter not in node.inputs:
                what = f"node '{node.name}' lacks the input '{parameter}' of {node.action}"
                yield Fault(node.origin, what, self._fitting(wanted))

    def _fitting(self, wanted) -> str:
        names = [name for name, given in self._types.items() if wanted.accepts(given)]
        return f"fields that fit: {', '.join(names)}" if names else "add a node that produces one"

    def _repeat_faults(self, node: Node, known: Signature) -> Iterator[Fault]:
        repeat = node.repeat_until
        condition = self._types.get(repeat.condition) if repeat else None
        if condition is not None and (condition.axis, condition.dtype) != (Axis.RUN, "bool"):
            what = f"node '{node.name}' repeats until '{node.repeat_until.condition}', {condition}"  # type: ignore[union-attr]
            yield Fault(node.origin, what, "give one bool for the run, as accumulate_signal does")
        for name in self._graph.loop(node):
            inner = self._signatures[name]
            if inner is not None and inner.trainable:
                what = f"node '{name}' changes or saves weights inside the loop of '{node.name}'"
                yield Fault(self._graph.node(name).origin, what, "take it out of the loop")


def _option_faults(node: Node, known: Signature) -> Iterator[Fault]:
    from hybridflow.recipe.graph_load import NODE_KEYS

    for name, value in node.options.items():
        option = known.options.get(name)
        if option is None:
            what = f"node '{node.name}' has an unknown key '{name}'"
            yield Fault(node.origin, what, hint(name, [*NODE_KEYS, *known.options]))
        elif problem := option.problem(value):
            fix = f"{name}: {option.dtype}, {option.description}"
            if option.choices:
                fix = hint(str(value), option.choices)
            yield Fault(node.origin, f"`{name}` of node '{node.name}' {problem}", fix)
    for name, option in known.options.items():
        if option.required and name not in node.options:
            what = f"node '{node.name}' lacks `{name}`, {option.description}"
            yield Fault(node.origin, what, f"add `{name}`: {', '.join(option.choices)}")


def _output_faults(node: Node, known: Signature) -> Iterator[Fault]:
    for output in node.outputs:
        if output not in known.outputs:
            what = f"{node.action} has no output '{output}'"
            fix = f"{hint(output, known.outputs)} (write `{{output: field}}`)"
            yield Fault(node.origin, what, fix)
