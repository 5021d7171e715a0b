"""Faults of the algorithm section against the losses and functions of the graphs."""

from collections.abc import Iterator

from hybridflow.recipe.axes import Axis
from hybridflow.recipe.catalogue import LOSSES, SCORE_LOSSES, signature
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.checks.use import LOOKS
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.graph import Node
from hybridflow.recipe.plan import Stage
from hybridflow.recipe.ranges import LARGEST

CHARGING = ("token_rewards", "reinforce_pp")
"""Functions that take the KL off the reward where algorithm.kl.place is reward."""


def response_faults(context: Context) -> Iterator[Fault]:
    """Losses of whole responses without their responses, or with settings of token losses."""
    for stage in context.stages:
        for node in stage.graph.nodes:
            told = str(node.options.get("loss"))
            loss = LOSSES.get(told) or SCORE_LOSSES.get(told)
            if loss is None or loss.samples is None:
                continue
            name = node.options["loss"]
            if loss.samples == 2 and stage.samples_per_prompt != 2:
                what = f"the loss '{name}' of node '{node.name}' takes two responses to a prompt"
                fix = "take `{responses: pairs}` from the inputs"
                yield Fault(node.origin, what, fix)


def critic_faults(context: Context) -> Iterator[Fault]:
    """A multiplier without its settings, and a KL in the reward that no node takes out of it."""
    nodes = [node for stage in context.stages for node in stage.graph.nodes]
    algorithm = context.recipe.algorithm
    if algorithm.lagrangian is None and any(node.function == "lagrangian" for node in nodes):
        what = "the function lagrangian needs algorithm.lagrangian, the limit of cost"
        yield context.fault("algorithm", what, "add `lagrangian: {limit: NUMBER}`")
    if algorithm.lagrangian and algorithm.lagrangian.start > algorithm.lagrangian.maximum:
        what = f"algorithm.lagrangian.start is above maximum={algorithm.lagrangian.maximum:g}"
        yield context.fault("algorithm.lagrangian.start", what, "lower it")
    takers = [node for node in nodes if node.function in CHARGING]
    if algorithm.kl.coef == 0 or algorithm.kl.place == "loss":
        return
    if algorithm.kl.estimator == "full":
        what = (
            "algorithm.kl.estimator full is a term of the loss; a token's reward takes one sample"
        )
        yield context.fault("algorithm.kl.estimator", what, "choose k1, k2, k3 or abs")
    fix = "set algorithm.kl.place to loss, or use a dataflow with such a node: ppo"
    if not takers:
        what = "algorithm.kl.place is reward, but the dataflow has no node of "
        what += " or ".join(CHARGING)
        yield context.fault("algorithm.kl.place", what, fix)
    for node in takers:
        if missing := sorted({"logprobs", "ref_logprobs"} - node.inputs.keys()):
            what = f"node '{node.name}' lacks `{'` and `'.join(missing)}`, which the KL in the "
            fix = "add `{logprobs: old_logprobs}` and `ref_logprobs` to its inputs"
            yield Fault(node.origin, what + "reward needs", fix)


def aggregation_faults(context: Context) -> Iterator[Fault]:
    """A divisor without its aggregation, and the reverse."""
    algorithm = context.recipe.algorithm
    constant = algorithm.aggregation == "constant"
    if constant and algorithm.loss_divisor is None:
        rollout = context.recipe.roles.rollout
        longest = "TOKENS" if rollout is None else rollout.sampling.max_tokens
        what = "algorithm.aggregation=constant lacks algorithm.loss_divisor"
        fix = f"set it, such as to the longest response: loss_divisor: {longest}"
        yield context.fault("algorithm.aggregation", what, fix)
    if not constant and algorithm.loss_divisor is not None:
        what = f"algorithm.loss_divisor does nothing under aggregation={algorithm.aggregation}"
        yield context.fault(
            "algorithm.loss_divisor", what, "remove it, or set algorithm.aggregation to constant"
        )


def clip_faults(context: Context) -> Iterator[Fault]:
    """A lower bound of ratios that no ratio can meet."""
    clip = context.recipe.algorithm.clip
    low = clip[0] if isinstance(clip, list) else clip
    if low is None or low < 1:
        return
    losses = {
        str(node.options.get("loss")) for stage in context.stages for node in stage.graph.nodes
    }
    bounded = [name for name in sorted(losses) if "clip" in _settings(name)]
    if bounded and not {"gmpo", "cispo"} & {*bounded}:
        what = f"algorithm.clip={low:g} bounds the ratio of {bounded[0]} below 1 - {low:g}"
        fix = "write `clip: 0.2` or `clip: [0.2, 0.28]`; only gmpo's bounds are of logarithms"
        yield context.fault("algorithm.clip", f"{what}, where no ratio can be", fix)


def _settings(name: str) -> tuple[str, ...]:
    loss = LOSSES.get(name)
    return () if loss is None else loss.settings


def sequence_faults(context: Context) -> Iterator[Fault]:
    """Advantages per token for a loss of whole responses."""
    for stage in context.stages:
        for node in stage.graph.nodes:
            loss = LOSSES.get(str(node.options.get("loss"))) if node.call == "update" else None
            if loss is not None and loss.whole_sequences and _per_token(stage, node):
                name = node.options["loss"]
                what = (
                    f"the loss '{name}' of node '{node.name}' takes one advantage per response, "
                    f"but '{node.inputs['advantages']}' has one per token"
                )
                fix = "use gspo_token, or a loss of single tokens such as ppo_clip"
                yield Fault(node.origin, what, fix)


def _per_token(stage: Stage, node: Node) -> bool:
    field = node.inputs.get("advantages", "")
    maker = stage.graph.producers.get(field)
    known = signature(None, maker.function) if maker is not None else None
    if maker is None or known is None:
        return False
    outputs = [known.outputs[o] for o, f in maker.outputs.items() if f == field]
    return any(kind.axis is Axis.TOKENS for kind in outputs)


def old_faults(context: Context) -> Iterator[Fault]:
    """An old policy that another role gives."""
    for stage in context.stages:
        for node in stage.graph.nodes:
            field = node.inputs.get("old_logprobs")
            maker = stage.graph.producers.get(field or "")
            if maker is not None and maker.call == "logprobs" and maker.role != node.role:
                what = (
                    f"node '{node.name}' compares with '{field}' of the role '{maker.role}': the "
                    "ratio would not be 1 on fresh samples"
                )
                fix = f"take them from a `logprobs` of '{node.role}', or name it `ref_logprobs`"
                yield Fault(node.origin, what, fix)


def adaptive_faults(context: Context) -> Iterator[Fault]:
    """An adaptive KL coefficient that cannot move, or has no KL to move by."""
    section = context.recipe.algorithm.kl
    if section.adaptive is None:
        return
    key = "algorithm.kl.adaptive"
    if section.coef == 0:
        what = f"{key} multiplies algorithm.kl.coef, which is 0"
        yield context.fault(key, what, "set coef to where it begins, such as 0.001")
        return
    for stage in context.stages:
        if stage.name == "main" and section.adaptive.horizon < stage.samples:
            what = f"{key}.horizon={section.adaptive.horizon:g} is less than a step's samples"
            fix = f"set it to at least {stage.samples}, such as {10 * stage.samples}"
            yield context.fault(f"{key}.horizon", what, fix)
        if stage.name == "main" and not any(_measures_kl(node) for node in stage.graph.nodes):
            what = f"{key} has no KL to go by: no node of the dataflow takes `ref_logprobs`"
            yield context.fault(key, what, "give them to the update, or remove `adaptive`")


def _measures_kl(node: Node) -> bool:
    return bool({"ref_logprobs", "ref_hidden"} & node.inputs.keys())


def reward_faults(context: Context) -> Iterator[Fault]:
    """Options of advantage functions that do not fit their inputs."""
    for stage in context.stages:
        for node in stage.graph.nodes:
            if node.function in ("gdpo", "weighted_sum"):
                yield from _weight_faults(node)


def full_kl_faults(context: Context) -> Iterator[Fault]:
    """Hidden states that nobody reads, or of a model whose output head is not at hand."""
    full = context.recipe.algorithm.kl.estimator == "full"
    for stage in context.stages:
        for node in stage.graph.nodes:
            field = node.inputs.get("ref_hidden") if node.call == "update" else None
            if field is None:
                if full and _estimates_kl(node) and context.recipe.algorithm.kl.coef == 0:
                    what = f"node '{node.name}' measures the KL by `ref_logprobs`, and the "
                    what += "estimator full reads `ref_hidden`"
                    yield context.fault("algorithm.kl.estimator", what, "choose k3, k2, k1 or abs")
                continue
            maker = stage.graph.producers.get(field)
            if not full:
                what = f"node '{node.name}' takes `ref_hidden`, which only the estimator full reads"
                yield Fault(node.origin, what, "set algorithm.kl.estimator to full, or remove it")
            elif getattr(context.recipe.roles.models().get("reference"), "model", None):
                what = "the estimator `full` has the output head of the policy's own start"
                fix = "remove roles.reference.model, or take an estimator of sampled tokens"
                yield context.fault("roles.reference.model", what, fix)
            elif maker is not None and maker.role != "reference":
                what = f"node '{maker.name}' gives '{field}' of the role '{maker.role}', but the "
                what += "estimator `full` has the output head of the reference"
                yield Fault(maker.origin, what, "use role: reference")


def _estimates_kl(node: Node) -> bool:
    """Whether a loss of tokens is told what a reference says of the sampled ones."""
    loss = LOSSES.get(str(node.options.get("loss"))) if node.call in LOOKS else None
    return loss is not None and loss.samples is None and "ref_logprobs" in node.inputs


def loop_faults(context: Context) -> Iterator[Fault]:
    """Fields that are to be kept but are not given, and a buffer longer than a response."""
    rollout = context.recipe.roles.rollout
    longest = LARGEST if rollout is None else rollout.sampling.max_tokens
    for stage in context.stages:
        for node in stage.graph.nodes:
            if node.function == "accumulate_signal":
                for output in node.outputs:
                    given = output.removeprefix("kept_")
                    if given != output and given not in node.inputs:
                        what = f"node '{node.name}' puts out `{output}` without taking `{given}`"
                        yield Fault(node.origin, what, f"add `{given}` to its inputs")
            if node.function == "soft_overlong":
                yield from _buffer_faults(node, longest)


def _buffer_faults(node: Node, longest: int) -> Iterator[Fault]:
    buffer = node.options.get("buffer")
    if isinstance(buffer, int) and buffer > longest:
        what = f"the buffer of node '{node.name}', {buffer} tokens, does not lie within "
        what += f"roles.rollout.sampling.max_tokens, {longest}"
        yield Fault(node.origin, what, "let it be between 1 and max_tokens")


def _weight_faults(node: Node) -> Iterator[Fault]:
    weights = node.options.get("weights")
    if isinstance(weights, list) and len(weights) != len(node.inputs):
        what = f"node '{node.name}' has {len(weights)} weights for {len(node.inputs)} rewards"
        yield Fault(node.origin, what, "give one weight per reward")


GRAPHS = ("dataflow", "warm_start.dataflow", "roles.*", "algorithm")

CHECKS = (
    Check(GRAPHS, critic_faults),
    Check(("algorithm", "roles.rollout"), aggregation_faults),
    Check(GRAPHS, clip_faults),
    Check(GRAPHS, sequence_faults),
    Check((*GRAPHS, "data"), response_faults),
    Check((*GRAPHS, "data"), adaptive_faults),
    Check(GRAPHS, old_faults),
    Check(GRAPHS, reward_faults),
    Check(GRAPHS, loop_faults),
    Check(GRAPHS, full_kl_faults),
)
