"""What the nodes of a recipe's graphs do, as far as settings depend on it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybridflow.recipe.catalogue import (
    FUNCTIONS,
    GRAPH_INPUTS,
    LOSSES,
    VALUE_LOSSES,
    column_keys,
)
from hybridflow.recipe.graph import Node
from hybridflow.recipe.plan import ACTOR, WARM_START, Plan, Stage
from hybridflow.recipe.schema import Recipe

LOOKS = ("update", "evaluate")
"""Calls that have a loss."""


@dataclass(frozen=True)
class Use:
    """What the nodes of a recipe's graphs do, as far as settings depend on it."""

    plan: Plan

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    def nodes(self, *calls: str) -> Iterator[tuple[Stage, Node]]:
        """Nodes that are on, with their stages; those of the given calls."""
        for stage in self.plan.stages:
            for node in stage.graph.nodes:
                if not calls or node.call in calls:
                    yield stage, node

    def reads(self, setting: str) -> bool:
        """Whether a loss or function declares that it reads ``algorithm.SETTING``."""
        return any(setting in settings_of(node) for _, node in self.nodes())

    def token_losses(self, *calls: str) -> Iterator[Node]:
        """Nodes with a loss of tokens."""
        for _, node in self.nodes(*calls):
            loss = LOSSES.get(str(node.options.get("loss")))
            if loss is not None and loss.samples is None:
                yield node

    def policy_updates(self, *, sampled: bool = False) -> Iterator[Node]:
        """Updates by advantages; ``sampled``: in stages that sample."""
        for stage, node in self.nodes("update"):
            loss = LOSSES.get(str(node.options["loss"]))
            if loss is not None and "advantages" in loss.needs and (stage.generates or not sampled):
                yield node

    def inputs(self) -> set[str]:
        """What all graphs take of the data, of held-out rows too."""
        names = {name for stage in self.plan.stages for name in stage.graph.inputs}
        return names & GRAPH_INPUTS.keys()

    def columns(self) -> tuple[str, ...]:
        """Keys of the data section whose columns are read."""
        return column_keys(self.inputs(), self.recipe.data.messages_column is not None)

    def names(self, role: str) -> bool:
        """Whether some node, on or off, acts on a role."""
        return any(role in stage.named for stage in self.plan.stages)

    def trains(self, role: str) -> bool:
        """Whether a role's own section says how it is trained, and it is."""
        stages = (stage for stage in self.plan.stages if role in stage.trained)
        return any(role != ACTOR or stage.name != "warm_start" for stage in stages)


def settings_of(node: Node) -> tuple[str, ...]:
    """Keys of ``algorithm`` that a node's loss or function declares."""
    if node.function is not None:
        known = FUNCTIONS.get(node.function)
        return () if known is None else known.settings
    name = str(node.options.get("loss")) if node.call in LOOKS else ""
    loss = LOSSES.get(name) or VALUE_LOSSES.get(name)
    return () if loss is None else loss.settings


def pays_kl(use: Use) -> bool:
    """Whether a KL could be a term of a loss, or of a reward."""
    if use.recipe.algorithm.kl.place == "reward":
        return True  # reward_faults says what is missing
    return any(use.policy_updates()) or compares(use, "update")


def compares(use: Use, *calls: str) -> bool:
    """Whether a loss of tokens is told what a reference says."""
    given = (node.inputs.keys() for node in use.token_losses(*calls))
    return any({"ref_logprobs", "ref_hidden"} & inputs for inputs in given)


def estimates_kl(use: Use) -> bool:
    return use.recipe.algorithm.kl.coef > 0 and pays_kl(use) or compares(use, *LOOKS)


def averages(use: Use) -> bool:
    """Whether a loss of a policy's tokens may be averaged otherwise: a warm start's never is."""
    stages = tuple(stage for stage in use.plan.stages if stage.name != WARM_START)
    return any(Use(replace(use.plan, stages=stages)).token_losses(*LOOKS))


def whitens(use: Use) -> bool:
    nodes = [node for _, node in use.nodes() if "gae.whiten_advantages" in settings_of(node)]
    return any(node.options.get("whiten") is None for node in nodes)


def own_old(use: Use) -> bool:
    """Whether an update gets old log-probabilities that its own role computed."""
    for stage, node in use.nodes("update"):
        maker = stage.graph.producers.get(node.inputs.get("old_logprobs", ""))
        if maker is not None and (maker.role, maker.call) == (node.role, "logprobs"):
            return True
    return False


def samples_as(use: Use, way: str) -> bool:
    told = (node.options.get("sampling", "training") for _, node in use.nodes("generate"))
    return way in told


def evaluation_temperature(use: Use) -> float:
    return 0.0 if use.recipe.evaluation is None else use.recipe.evaluation.temperature


def falls(use: Use, role: str) -> bool:
    if not role:
        assert use.recipe.warm_start is not None, "a key below it"
        return use.recipe.warm_start.schedule != "constant"
    optimizer = getattr(use.recipe.roles.models()[role], "optimizer", None)
    return optimizer is not None and optimizer.schedule != "constant"
