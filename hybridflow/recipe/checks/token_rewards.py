"""Rewards of single tokens: graphs that do not use them, and nodes that mix them up."""

from collections.abc import Iterator

from hybridflow.recipe.catalogue import REWARDS
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.graph import Node
from hybridflow.recipe.plan import Stage
from hybridflow.recipe.schema_rewards import RewardSection

SHIPPED = "ppo or safe_rlhf"


def unread_faults(context: Context) -> Iterator[Fault]:
    """Roles that score tokens in a graph that takes only their sums."""
    if not context.has_main:
        return
    nodes = [node for stage in context.stages for node in stage.graph.nodes]
    read = {field for node in nodes for field in node.inputs.values()}
    for role, section in context.recipe.roles.rewards().items():
        scoring = [n for n in nodes if n.role == role and n.call == "score"]
        given = {n.outputs.get("token_rewards") for n in scoring}
        if not _scores_tokens(section):
            continue
        if scoring and not given & read:
            key = f"roles.{role}.level"
            what = f"{key}: token does nothing: no node of the dataflow reads the role's "
            what += "`token_rewards`, only a sum for each response"
            fix = "set it to sequence and return one number for each response, or use a dataflow "
            fix += f"that gives every token its own reward: {SHIPPED}"
            yield context.fault(key, what, fix)


def _scores_tokens(section: RewardSection) -> bool:
    """Whether the level is ``token``, and no function of the role is of whole responses, which is
    a fault by itself."""
    named = [part.function for _, part in section.parts("").values()]
    whole = any(name in REWARDS and not REWARDS[name].token_level for name in named)
    return section.level == "token" and not whole


def mixed_faults(context: Context) -> Iterator[Fault]:
    """Nodes of the function token_rewards with no reward, with one lost or with one twice."""
    for stage in context.stages:
        for node in stage.graph.nodes:
            if node.function == "token_rewards":
                yield from _mixed_faults(stage, node)


def _mixed_faults(stage: Stage, node: Node) -> Iterator[Fault]:
    fields = {name: node.inputs.get(name) for name in ("rewards", "token_scores")}
    outcome, scores = fields.values()
    add = node.options.get("add_rewards", False)
    if outcome is None and scores is None:
        what = f"node '{node.name}' has neither `rewards` nor `token_scores`"
        yield Fault(node.origin, what, "take one of them from a node that scores")
    elif outcome is None or scores is None:
        if add:
            what = f"node '{node.name}' has add_rewards, but only {_given(fields)}"
            yield Fault(
                node.origin, what, "give it both `rewards` and `token_scores`, or remove it"
            )
    else:
        same = stage.graph.producers.get(outcome) is stage.graph.producers.get(scores)
        if same and add:
            what = f"node '{node.name}' would count '{outcome}' twice: it is the sum of '{scores}'"
            yield Fault(node.origin, what, "remove add_rewards")
        if not same and not add:
            what = f"node '{node.name}' takes '{scores}' in the place of '{outcome}', which is of "
            what += "another node and would be lost"
            fix = "add `add_rewards: true`, or take one of the two alone"
            yield Fault(node.origin, what, fix)


def _given(fields: dict[str, str | None]) -> str:
    return ", ".join(f"`{name}`" for name, field in fields.items() if field is not None)


GRAPHS = ("dataflow", "warm_start.dataflow", "roles.*")

CHECKS = (Check(GRAPHS, unread_faults), Check(GRAPHS, mixed_faults))
