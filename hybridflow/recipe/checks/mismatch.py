"""Faults of what compares policies: corrections, agreement, references, updates after updates."""

from collections.abc import Iterator

from hybridflow.recipe.catalogue import LOSSES
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.graph import Node
from hybridflow.recipe.plan import Stage
from hybridflow.recipe.schema_algorithm import RolloutCorrectionSection

NEEDS = {
    "rollout_correction": ("rollout_logprobs", "old_logprobs"),
    "off_policy_mask": ("rollout_logprobs",),
    "agreement.bound": ("rollout_logprobs",),
}
"""Settings, and what each update by advantages must be given for them."""


def bound_faults(context: Context) -> Iterator[Fault]:
    """Bounds of a correction that leave out a ratio of 1, where the engines agree."""
    told = context.recipe.algorithm.rollout_correction
    if told is None:
        return
    key = "algorithm.rollout_correction"
    if told.low is not None and told.low >= told.high:
        what = f"{key} has low {told.low:g} and high {told.high:g}"
        yield context.fault(f"{key}.low", what, "let low be below high")
    elif told.high < 1:
        what = f"{key}.high={told.high:g} weighs down tokens on which the engines agree: their "
        yield context.fault(f"{key}.high", what + "ratio is 1", "set it to 1 or more, such as 2")
    elif told.method != "truncated" and _lowest(told) > 1:
        what = f"{key}.low={_lowest(told):g} leaves out tokens on which the engines agree: their "
        yield context.fault(f"{key}.low", what + "ratio is 1", "set it to 1 or less, such as 0.5")
    elif told.method != "truncated" and _lowest(told) == told.high:
        what = f"no ratio but 1 lies within {key}: high is 1 and low, where it is null, 1 / high"
        yield context.fault(f"{key}.high", what, "set high above 1, such as to 2, or low below 1")


def _lowest(told: RolloutCorrectionSection) -> float:
    return 1 / told.high if told.low is None else told.low


def need_faults(context: Context) -> Iterator[Fault]:
    """Settings whose fields an update by advantages is not given."""
    algorithm = context.recipe.algorithm
    told = {
        "rollout_correction": algorithm.rollout_correction,
        "off_policy_mask": algorithm.off_policy_mask,
        "agreement.bound": algorithm.agreement.bound,
    }
    for key in (key for key, value in told.items() if value is not None):
        for stage, node in _policy_updates(context):
            yield from _need_faults(stage, node, key)
            if key == "agreement.bound" and node.inputs.get("rollout_logprobs") in node.delay:
                what = (
                    f"node '{node.name}' takes samples of earlier steps, whose weights are older "
                )
                what += "than the trainer's: algorithm.agreement.bound would compare no token"
                yield Fault(node.origin, what, "remove algorithm.agreement.bound")


def _policy_updates(context: Context) -> Iterator[tuple[Stage, Node]]:
    """Updates by advantages, in stages that sample."""
    for stage in context.stages:
        for node in stage.graph.nodes if stage.generates else ():
            loss = LOSSES.get(str(node.options.get("loss"))) if node.call == "update" else None
            if loss is not None and "advantages" in loss.needs:
                yield stage, node


def _need_faults(stage: Stage, node: Node, key: str) -> Iterator[Fault]:
    fields = NEEDS[key]
    for field in fields:
        if field not in node.inputs:
            what = f"node '{node.name}' lacks `{field}`, which algorithm.{key} needs"
            yield Fault(node.origin, what, _how_to_give(stage, node, field))
    given = [node.inputs.get(field) for field in fields]
    if None not in given and len(set(given)) < len(given):
        what = f"node '{node.name}' takes '{given[0]}' as {' and as '.join(fields)}: "
        what += f"algorithm.{key} would find no difference"
        fix = "compute old_logprobs with the actor, or remove the setting"
        yield Fault(node.origin, what, fix)


def _how_to_give(stage: Stage, node: Node, field: str) -> str:
    if field in stage.graph.producers:
        return f"add `{field}` to its inputs"
    if field == "old_logprobs":
        made = f"{{role: {node.role}, call: logprobs, in: [prompts, responses], "
        made += "out: [{logprobs: old_logprobs}]}"
        return f"add a node `old: {made}` before it, and `{field}` to its inputs"
    return f"add `{field}` to what the generating node puts out, and to its inputs"


def reference_faults(context: Context) -> Iterator[Fault]:
    """A reference that is no other model's view: its KL, or log-ratio, would always be 0."""
    for stage in context.stages:
        for node in stage.graph.nodes:
            field = node.inputs.get("ref_logprobs")
            maker = stage.graph.producers.get(field or "")
            if maker is None:
                continue
            policy = _policy(stage, node)
            what = f"node '{node.name}' compares with '{field}' as its reference, "
            fix = "take them from a `logprobs` of another model, such as the role reference"
            if maker.call != "logprobs":
                what += f"which node '{maker.name}' gives: the policy that sampled"
                yield Fault(node.origin, what, fix)
            elif maker.role == policy:
                what = f"node '{node.name}' compares the role '{policy}' with itself"
                fix = f"give '{maker.name}' the role `reference`, or leave `ref_logprobs` out"
                yield Fault(node.origin, what, fix)


def _policy(stage: Stage, node: Node) -> str | None:
    """The role whose log-probabilities a node compares with those of a reference."""
    if node.role is not None:
        return node.role
    field = node.inputs.get("logprobs") or node.inputs.get("prm_logprobs") or ""
    maker = stage.graph.producers.get(field)
    return None if maker is None else maker.role


def repeated_faults(context: Context) -> Iterator[Fault]:
    """A further update of a role on samples of a step, which meets weights that have moved."""
    for stage in (stage for stage in context.stages if not stage.graph.cycle()):
        place = {node.name: number for number, node in enumerate(stage.graph.order)}
        updates: list[Node] = []
        for node in (node for node in stage.graph.order if node.call == "update"):
            sampled = place.get(_sampler(stage, node), 0)
            since = (u for u in updates if u.role == node.role and place[u.name] > sampled)
            if (earlier := next(since, None)) is not None and stage.generates:
                yield from _repeated_faults(context, stage, node, earlier, place)
            updates.append(node)


def _sampler(stage: Stage, node: Node) -> str:
    """The node that sampled the responses of an update, through functions that pass them on."""
    maker = stage.graph.producers.get(node.inputs.get("responses", ""))
    while maker is not None and maker.function is not None:
        maker = stage.graph.producers.get(maker.inputs.get("responses", ""))
    return "" if maker is None else maker.name


def _repeated_faults(
    context: Context, stage: Stage, node: Node, earlier: Node, place: dict[str, int]
) -> Iterator[Fault]:
    loss = LOSSES.get(str(node.options.get("loss")))
    if loss is None or loss.samples is not None:
        return
    moved = f"node '{earlier.name}' has moved the weights before node '{node.name}' in each step"
    old = stage.graph.producers.get(node.inputs.get("old_logprobs", ""))
    late = old is not None and old.role == node.role and place[old.name] > place[earlier.name]
    if loss.compares_policies and "old_logprobs" not in node.inputs:
        what = f"{moved}, which lacks `old_logprobs`: it would take the moved policy for the old"
        fix = f"compute them before '{earlier.name}', and add `old_logprobs` to its inputs"
        yield Fault(node.origin, what, fix)
    elif loss.compares_policies and old is not None and late:
        what = f"{moved}, and its old_logprobs come from '{old.name}', which follows it"
        yield Fault(node.origin, what, f"let '{old.name}' stand before '{earlier.name}'")
    if context.recipe.algorithm.agreement.bound is not None and "rollout_logprobs" in node.inputs:
        what = f"{moved}: algorithm.agreement.bound would blame the servers for it"
        fix = "remove algorithm.agreement.bound, or one of the two updates"
        yield Fault(node.origin, what, fix)


def estimator_faults(context: Context) -> Iterator[Fault]:
    """An estimator whose gradient, as a term of a loss, has the mean 0."""
    kl = context.recipe.algorithm.kl
    if kl.coef > 0 and kl.place == "loss" and kl.estimator == "k1":
        what = "algorithm.kl.estimator k1 penalises nothing in the loss: the mean of its gradient "
        what += "over the policy's own samples is 0"
        fix = "choose k2 (whose gradient is the KL's), k3, or full; or set algorithm.kl.place to "
        fix += "reward"
        yield context.fault("algorithm.kl.estimator", what, fix)


def whiten_faults(context: Context) -> Iterator[Fault]:
    """Advantages that are whitened before a cost is weighed against them."""
    gae = context.recipe.algorithm.gae
    default = True if gae is None else gae.whiten_advantages
    for stage in context.stages:
        for node in (node for node in stage.graph.nodes if node.function == "lagrangian"):
            for name in ("advantages", "cost_advantages"):
                maker = stage.graph.producers.get(node.inputs.get(name, ""))
                if maker is None or maker.function != "gae":
                    continue
                told = maker.options.get("whiten")
                if default if told is None else told:
                    what = f"node '{maker.name}' whitens what node '{node.name}' weighs as "
                    what += f"`{name}`: reward and cost lose their scales"
                    yield Fault(maker.origin, what, f"add `whiten: false` to '{maker.name}'")


GRAPHS = (
    *("dataflow", "warm_start.dataflow", "roles.*", "roles.actor.mini_batches"),
    *("roles.actor.epochs", "algorithm.kl", "algorithm.rollout_correction"),
)

CHECKS = (
    Check(("algorithm.rollout_correction",), bound_faults),
    Check((*GRAPHS, "algorithm"), need_faults),
    Check(GRAPHS, reference_faults),
    Check((*GRAPHS, "algorithm.agreement"), repeated_faults),
    Check(("algorithm.kl",), estimator_faults),
    Check((*GRAPHS, "algorithm.gae"), whiten_faults),
)
