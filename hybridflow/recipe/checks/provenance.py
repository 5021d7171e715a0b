"""Fields of the right type from the wrong node: another critic's values, another role's scores."""

from collections.abc import Iterator

from hybridflow.recipe.catalogue import VALUE_LOSSES, signature
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.graph import Node
from hybridflow.recipe.plan import Stage


def maker(stage: Stage, node: Node | None, parameter: str) -> Node | None:
    """The node that gives a node's input; None: the data do, or nothing does."""
    return None if node is None else stage.graph.producers.get(node.inputs.get(parameter, ""))


def behind(stage: Stage, field: str) -> list[Node]:
    """The calls of roles that a field is made of, through the functions between."""
    found: list[Node] = []
    fields, seen = [field], {field}
    while fields:
        made = stage.graph.producers.get(fields.pop())
        if made is None:
            continue
        if made.function is None:
            found.append(made)
            continue
        inputs = {name for name in made.inputs.values() if name not in seen}
        seen |= inputs
        fields.extend(inputs)
    return found


def value_faults(context: Context) -> Iterator[Fault]:
    """A critic that learns another critic's returns, or is clipped around another's values."""
    for stage in context.stages:
        for node in stage.graph.nodes:
            if node.call != "update" or node.options.get("loss") not in VALUE_LOSSES:
                continue
            yield from _foreign_values(stage, node, node)
            returns = maker(stage, node, "returns")
            if returns is not None and returns.function == "gae":
                yield from _foreign_values(stage, node, returns)


def _foreign_values(stage: Stage, update: Node, node: Node) -> Iterator[Fault]:
    values = maker(stage, node, "values")
    if values is None or values.call != "values" or values.role == update.role:
        return
    what = f"node '{update.name}' trains the role '{update.role}', but "
    if node is update:
        what += f"takes '{node.inputs['values']}' of the role '{values.role}' as its values"
    else:
        what += f"'{update.inputs['returns']}' are over the values of the role '{values.role}'"
    yield Fault(update.origin, what, f"take them of a `values` of '{update.role}'")


def cost_faults(context: Context) -> Iterator[Fault]:
    """A multiplier that weighs a reward against itself, or moves by what it does not weigh."""
    for stage in context.stages:
        for node in stage.graph.nodes:
            if node.function != "lagrangian":
                continue
            told = [node.inputs.get(name, "") for name in ("advantages", "cost_advantages")]
            if told[0] and told[0] == told[1]:
                what = f"node '{node.name}' weighs '{told[0]}' against itself"
                yield Fault(node.origin, what, "give it the advantages of the cost as well")
                continue
            yield from _other_cost(stage, node)
            yield from _paid_divergence(context, stage, node)


def _other_cost(stage: Stage, node: Node) -> Iterator[Fault]:
    fields = {name: node.inputs.get(name, "") for name in ("cost_advantages", "costs")}
    weighed, moved_by = (
        {one.name for one in behind(stage, field) if one.call == "score"}
        for field in fields.values()
    )
    if weighed and moved_by and not weighed & moved_by:
        what = (
            f"node '{node.name}' weighs what node '{min(weighed)}' scores, but "
            f"'{fields['costs']}', by which lambda moves, are of node '{min(moved_by)}'"
        )
        yield Fault(node.origin, what, f"take the scores of '{min(weighed)}' as `costs`")


def _paid_divergence(context: Context, stage: Stage, node: Node) -> Iterator[Fault]:
    """A KL that makes the cost less: the further from the reference, the better."""
    kl = context.recipe.algorithm.kl
    tokens = maker(stage, maker(stage, node, "cost_advantages"), "token_rewards")
    if kl.coef == 0 or kl.place == "loss" or tokens is None or tokens.function != "token_rewards":
        return
    share = tokens.options.get("kl_share", 1.0)
    if isinstance(share, (int, float)) and share > 0:
        what = f"node '{tokens.name}' takes the KL off a cost (kl_share {share:g}): the further "
        what += "from the reference, the less it costs"
        yield Fault(tokens.origin, what, "give it a negative kl_share, such as -0.5, or 0")


def greedy_faults(context: Context) -> Iterator[Fault]:
    """Functions that compare samples of a prompt, of which a greedy node gives one."""
    for stage in context.stages:
        for node in stage.graph.nodes:
            known = signature(None, node.function)
            if known is None or not known.compares_samples:
                continue
            for scored in behind(stage, node.inputs.get("rewards", "")):
                sampler = maker(stage, scored, "responses")
                if sampler is not None and sampler.options.get("sampling") == "greedy":
                    what = f"node '{node.name}' compares samples of a prompt, and the greedy node "
                    what += f"'{sampler.name}' gives one of each"
                    fix = f"remove `sampling: greedy` from '{sampler.name}'"
                    yield Fault(node.origin, what, fix)


def baseline_faults(context: Context) -> Iterator[Fault]:
    """KTO's baseline on the answers themselves, where it is the very reward it is taken off."""
    for stage in context.stages:
        for node in (node for node in stage.graph.nodes if node.function == "kto_baseline"):
            for parameter in ("logprobs", "ref_logprobs"):
                responses = maker(stage, maker(stage, node, parameter), "responses")
                if responses is None or responses.function is None:
                    what = f"node '{node.name}' takes `{parameter}` of answers to their own prompts"
                    fix = "take those of answers that rotate_responses gave to other prompts"
                    yield Fault(node.origin, what, fix)


GRAPHS = ("dataflow", "warm_start.dataflow", "roles.*", "algorithm.kl")

CHECKS = (
    Check(GRAPHS, value_faults),
    Check(GRAPHS, cost_faults),
    Check(GRAPHS, greedy_faults),
    Check(GRAPHS, baseline_faults),
)
