"""Faults of the graphs, and of what an update needs under the recipe's algorithm."""

from collections.abc import Callable, Iterator

from hybridflow.recipe.catalogue import (
    GRAPH_INPUTS,
    LOSSES,
    SCORE_LOSSES,
    VALUE_LOSSES,
    signature,
)
from hybridflow.recipe.catalogue_losses import LossEntry
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.graph import Graph, Node
from hybridflow.recipe.plan import ACTOR, Stage


def graph_faults(context: Context) -> Iterator[Fault]:
    """What compiling found."""
    yield from context.compiled[1]


def update_faults(context: Context) -> Iterator[Fault]:
    """Inputs that a loss needs, given KL, mini-batches and delays, or has no use for."""
    for stage in context.stages:
        for node in stage.graph.nodes:
            if node.call == "update":
                yield from _missing_inputs(context, stage, node)


def _missing_inputs(context: Context, stage: Stage, node: Node) -> Iterator[Fault]:
    name = str(node.options.get("loss"))
    loss = LOSSES.get(name) or VALUE_LOSSES.get(name) or SCORE_LOSSES.get(name)
    if loss is None:
        return
    for parameter in loss.needs:
        if parameter not in node.inputs:
            what = f"node '{node.name}' lacks `{parameter}`, which the loss '{name}' needs"
            yield Fault(node.origin, what, f"add `{parameter}` to its inputs")
    for parameter in _unread(name, loss) & node.inputs.keys():
        what = f"node '{node.name}' takes `{parameter}`, which the loss '{name}' does not read"
        yield Fault(node.origin, what, "remove it from its inputs, or use another loss")
    if not loss.needs or loss.samples is not None or name in VALUE_LOSSES:
        return  # neither a policy that sampled nor a reference
    off_policy = loss.compares_policies and (stage.off_policy or node.delay)
    if off_policy and "old_logprobs" not in node.inputs:
        reason = "delayed samples" if node.delay else "mini_batches * epochs > 1"
        what = f"node '{node.name}' lacks `old_logprobs`, which {reason} need"
        fix = "compute them before the update, or pass `{old_logprobs: rollout_logprobs}`"
        yield Fault(node.origin, what, fix)
    kl = context.recipe.algorithm.kl
    field, call = (
        ("ref_logprobs", "logprobs") if kl.estimator != "full" else ("ref_hidden", "hidden")
    )
    if kl.coef > 0 and field not in node.inputs:
        what = f"node '{node.name}' lacks `{field}`, which algorithm.kl.coef > 0 needs"
        if kl.estimator == "full":
            what += " with the estimator `full`"
        fix = f"add a node `{{role: reference, call: {call}}}`, or set algorithm.kl.coef to 0"
        yield Fault(node.origin, what, fix)


def _unread(name: str, loss: LossEntry) -> set[str]:
    """Inputs of an update that a loss of its kind may need, and this one has no use for."""
    if name in VALUE_LOSSES:
        return {"margins"}
    if name in SCORE_LOSSES:
        return {"values", "returns"}
    of_tokens = {"labels", "kl_baseline", "advantages"}
    of_responses = {"old_logprobs", "rollout_logprobs", "ref_logprobs", "ref_hidden"}
    return (of_tokens | (set() if loss.samples is None else of_responses)) - {*loss.needs}


def publish_faults(context: Context) -> Iterator[Fault]:
    """A stage that trains the actor without a word to the servers that sample, in it or later, or
    with an old one."""
    for number, stage in enumerate(context.stages):
        updates = [n for n in stage.graph.nodes if n.call == "update" and n.role == ACTOR]
        publishes = any(node.call == "publish" for node in stage.graph.nodes)
        if updates and not publishes and any(s.generates for s in context.stages[number:]):
            what = f"node '{updates[-1].name}' trains the actor, but no node publishes its weights"
            call = f"{{role: actor, call: publish, to: rollout, after: [{updates[-1].name}]}}"
            yield Fault(updates[-1].origin, what, f"add `publish: {call}`")
        late = list(_not_awaited(stage.graph, "publish", lambda node: node.role == ACTOR))
        never = set.intersection(*(set(missing) for _, missing in late)) if late else set()
        if never:
            node, names = late[-1][0], sorted(never)
            what = f"node '{node.name}' does not wait for {_listed(names)}: the servers would "
            what += "sample with the weights before it"
            yield Fault(node.origin, what, f"add {', '.join(names)} to its `after`")


def save_faults(context: Context) -> Iterator[Fault]:
    """Checkpoints that could be written while a model is being trained."""
    for stage in context.stages:
        for node, missing in _not_awaited(stage.graph, "save", lambda node: True):
            if not missing:
                continue
            what = f"node '{node.name}' saves every trained model, but does not wait for "
            fix = f"add {', '.join(missing)} to its `after`"
            yield Fault(node.origin, what + _listed(missing), fix)


def _not_awaited(
    graph: Graph, call: str, counts: Callable[[Node], bool]
) -> Iterator[tuple[Node, list[str]]]:
    """Nodes of a call, each with the updates, of those that count, for which it does not wait."""
    if graph.cycle():
        return
    for node in (node for node in graph.nodes if node.call == call):
        before = {node.name}
        for other in reversed(graph.order):
            if other.name in before:
                before |= graph.dependencies(other)
        updates = [n for n in graph.nodes if n.call == "update" and counts(n)]
        yield node, [n.name for n in updates if n.name not in before]


def _listed(names: list[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)


def warmup_faults(context: Context) -> Iterator[Fault]:
    """A warm-up of the critic in which the actor would train, or nothing would."""
    key = "algorithm.critic_warmup_steps"
    for stage in (stage for stage in context.stages if stage.name == "critic_warmup"):
        for node in stage.graph.nodes:
            if node.role == ACTOR and node.call in ("update", "publish"):
                what = f"node '{node.name}' would {node.call} the actor during {key}"
                yield Fault(node.origin, what, "give it `when: actor_trains`")
        if not stage.trained:
            what = f"{key} does nothing: the dataflow trains the actor alone"
            yield context.fault(key, what, "remove it, or use a dataflow with a critic")
        elif context.recipe.roles.actor is None:
            what = f"{key} does nothing: there is no actor that would wait"
            yield context.fault(key, what, "remove it, and raise steps")


def group_faults(context: Context) -> Iterator[Fault]:
    """Group sizes that the graph cannot work with."""
    for stage in context.stages:
        for node in stage.graph.nodes:
            known = signature(None, node.function)
            compares = known is not None and known.compares_samples
            if compares and stage.samples_per_prompt == 1:
                what = f"node '{node.name}' compares samples of a prompt, but there is one of each"
                key, fix = "data.samples_per_prompt", "set data.samples_per_prompt to 2 or more"
                if stage.name == "warm_start":
                    key, fix = "warm_start.dataflow", "warm up by a dataflow on the data's answers"
                    what += " in a warm start"
                yield context.fault(key, what, fix)
            yield from _brought_faults(context, stage, node)


def _brought_faults(context: Context, stage: Stage, node: Node) -> Iterator[Fault]:
    """Responses that the data brings, and another number of them."""
    given = {f: GRAPH_INPUTS[f].samples for f in _of_data(stage, node)}
    brought = {field: samples for field, samples in given.items() if samples is not None}
    if len(set(brought.values())) > 1:
        listed = ", ".join(f"{field} ({samples} of a prompt)" for field, samples in brought.items())
        what = f"node '{node.name}' mixes responses of different data: {listed}"
        yield Fault(node.origin, what, "take all its fields from one kind of row")
    asked = context.recipe.data.samples_per_prompt
    if brought and asked > 1 and stage.name == "main" and node.call == "update":
        field, samples = next(iter(brought.items()))
        what = (
            f"node '{node.name}' takes '{field}', of which the data has {samples} for a prompt, "
            f"but data.samples_per_prompt is {asked}"
        )
        yield context.fault("data.samples_per_prompt", what, "set data.samples_per_prompt to 1")


def _of_data(stage: Stage, node: Node) -> list[str]:
    """Fields of a node that the data gives; a node's own output may have the same name."""
    return [f for f in node.inputs.values() if f in stage.graph.inputs and f in GRAPH_INPUTS]


def evaluation_faults(context: Context) -> Iterator[Fault]:
    """Evaluation without data, or nodes that evaluate without the section."""
    recipe = context.recipe
    if recipe.evaluation is not None and recipe.data.eval is None:
        what = "there is an evaluation section, but no data to evaluate on"
        yield context.fault("evaluation", what, "set data.eval, or remove `evaluation`")
    for stage, node in [(one, node) for one in context.stages for node in one.graph.nodes]:
        rows = {GRAPH_INPUTS[f].batch for f in _of_data(stage, node)}
        evaluates = node.options.get("sampling") == "evaluation"
        if evaluates and "train" in rows:
            what = f"node '{node.name}' samples training rows as evaluation"
            yield Fault(node.origin, what, "remove `sampling: evaluation`, or give it eval_prompts")
        if recipe.evaluation is None and (evaluates or "eval" in rows):
            what = f"node '{node.name}' evaluates, but the recipe has no evaluation section"
            yield Fault(node.origin, what, "add `every: evaluation` to it, or the section")


def section_faults(context: Context) -> Iterator[Fault]:
    """Sections that no node heeds."""
    recipe = context.recipe
    if not context.has_main:
        return
    graphs = [stage.graph for stage in context.stages]
    names = {field for graph in graphs for field in graph.inputs}
    if recipe.evaluation is not None and not any(name.startswith("eval_") for name in names):
        what = "no node of the dataflow evaluates, so the evaluation section does nothing"
        yield context.fault("evaluation", what, "remove it, or add nodes with `every: evaluation`")
    calls = {node.call for graph in graphs for node in graph.nodes}
    if recipe.checkpoint.every is not None and "save" not in calls:
        what = "no node of the dataflow saves, so checkpoint.every does nothing"
        yield context.fault(
            "checkpoint.every", what, "remove it, or add a node `{role: actor, call: save}`"
        )


GRAPH_KEYS = (
    *("dataflow", "warm_start.dataflow", "roles.*", "algorithm.kl"),
    *("roles.actor.mini_batches", "roles.actor.epochs"),
)

CHECKS = (
    Check(GRAPH_KEYS, graph_faults),
    Check(GRAPH_KEYS, update_faults),
    Check(GRAPH_KEYS, publish_faults),
    Check(GRAPH_KEYS, save_faults),
    Check((*GRAPH_KEYS, "algorithm.critic_warmup_steps"), warmup_faults),
    Check((*GRAPH_KEYS, "data.samples_per_prompt"), group_faults),
    Check((*GRAPH_KEYS, "evaluation", "data.eval"), evaluation_faults),
    Check((*GRAPH_KEYS, "evaluation", "checkpoint"), section_faults),
)
