"""Recipes that run and teach nothing, or something else than they say."""

from collections.abc import Iterator

from hybridflow.recipe.catalogue import VALUE_LOSSES
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.checks.provenance import maker
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.plan import ACTOR


def weight_faults(context: Context) -> Iterator[Fault]:
    """KTO with both of its weights at 0."""
    told = context.recipe.algorithm.preference
    if told is not None and told.desirable_weight == told.undesirable_weight == 0:
        what = "algorithm.preference has both weights at 0: the loss is 0 whatever it is shown"
        fix = "set desirable_weight or undesirable_weight above 0"
        yield context.fault("algorithm.preference.desirable_weight", what, fix)


def teacher_faults(context: Context) -> Iterator[Fault]:
    """A teacher that is the student: its advantages are all 0."""
    for stage in context.stages:
        for node in (node for node in stage.graph.nodes if node.function == "reverse_kl"):
            teacher = maker(stage, node, "teacher_logprobs")
            student = maker(stage, node, "logprobs")
            if teacher is None or student is None or teacher.call != "logprobs":
                continue
            role = str(teacher.role)
            if role in stage.trained and student.role not in stage.trained:
                what = f"node '{node.name}' would train the role '{role}' away from "
                what += f"'{student.role}', which it takes for the student"
                yield Fault(node.origin, what, "swap `logprobs` and `teacher_logprobs`")
            elif role == student.role:
                what = f"node '{node.name}' compares the role '{role}' with itself"
                yield Fault(node.origin, what, f"give '{teacher.name}' the role of a teacher")
            elif getattr(context.models.get(role), "model", role) is None:
                what = f"the role '{role}' teaches with the weights with which the student begins: "
                what += "it has nothing to tell"
                yield context.fault(f"roles.{role}", what, f"set roles.{role}.model")


def critic_faults(context: Context) -> Iterator[Fault]:
    """A critic with an optimizer whose values are read, and which no node updates."""
    nodes = [node for stage in context.stages for node in stage.graph.nodes]
    updated = {
        n.role for n in nodes if n.call == "update" and n.options.get("loss") in VALUE_LOSSES
    }
    asked = {node.role: node for node in nodes if node.call == "values"}
    for role, node in asked.items():
        section = context.models.get(str(role))
        if role not in updated and getattr(section, "optimizer", None) is not None:
            what = f"node '{node.name}' reads the values of the role '{role}', which no node "
            what += "trains: they would stay what they are at the start"
            call = f"{{role: {role}, call: update, in: [prompts, responses, values, returns], "
            yield Fault(node.origin, what, f"add `update_{role}: {call}loss: value_clip}}`")


def publish_faults(context: Context) -> Iterator[Fault]:
    """Weights that are sent less often than they move: between, no version tells of their age."""
    for stage in context.stages:
        samples = any(
            node.call == "generate" and node.options.get("sampling", "training") == "training"
            for node in stage.graph.nodes
        )
        moves = {n.every for n in stage.graph.nodes if n.call == "update" and n.role == ACTOR}
        for node in stage.graph.nodes:
            rare = node.call == "publish" and node.every is not None and moves != {node.every}
            if samples and moves and rare:
                what = f"node '{node.name}' does not publish in every step that trains the actor: "
                what += "the samples of the steps between would be of older weights, untold"
                fix = "remove its `every`; for older samples, `delay` an edge and set "
                yield Fault(node.origin, what, fix + "roles.rollout.max_staleness")


def staleness_faults(context: Context) -> Iterator[Fault]:
    """Samples of earlier steps, which are older than the recipe allows."""
    servers = context.recipe.roles.rollout
    if servers is None:
        return
    for stage in context.stages:
        for node in (node for node in stage.graph.nodes if node.call == "update"):
            steps = node.delay.get(node.inputs.get("token_versions", ""), 0)
            if stage.generates and steps > servers.max_staleness:
                key = "roles.rollout.max_staleness"
                what = f"node '{node.name}' trains on samples of {steps} steps before, but {key} "
                what += f"allows {servers.max_staleness}"
                yield context.fault(key, what, f"set it to {steps} or more, or shorten the delay")


def kept_faults(context: Context) -> Iterator[Fault]:
    """Prompts that are kept until there are enough, and nothing that looks whether there are."""
    for stage in context.stages:
        for node in stage.graph.nodes:
            if node.function == "accumulate_signal" and node.repeat_until is None:
                what = f"node '{node.name}' does not repeat: a step would train on however many "
                what += "prompts one round has kept"
                fix = "add `enough` to its outputs, and "
                fix += "`repeat_until: {condition: enough, from: generate, cap: 16}`"
                yield Fault(node.origin, what, fix)


def rotation_faults(context: Context) -> Iterator[Fault]:
    """Answers that go to the next prompt, of which there is none."""
    recipe = context.recipe
    held_out = None if recipe.evaluation is None else recipe.evaluation.prompts
    for stage in context.stages:
        for node in (n for n in stage.graph.nodes if n.function == "rotate_responses"):
            eval_rows = node.inputs.get("responses", "").startswith("eval_")
            warm = stage.name == "warm_start"
            key = "warm_start.prompts_per_step" if warm else "data.prompts_per_step"
            key = "evaluation.prompts" if eval_rows else key
            if (held_out if eval_rows else stage.prompts_per_step) == 1:
                what = f"node '{node.name}' gives each prompt the answer of another, and {key} is 1"
                yield context.fault(key, what, "set it to 2 or more")


GRAPHS = ("dataflow", "warm_start.dataflow", "roles.*")

CHECKS = (
    Check(("algorithm.preference",), weight_faults),
    Check(GRAPHS, teacher_faults),
    Check(GRAPHS, critic_faults),
    Check(GRAPHS, publish_faults),
    Check((*GRAPHS, "roles.rollout"), staleness_faults),
    Check(GRAPHS, kept_faults),
    Check((*GRAPHS, "data.prompts_per_step", "evaluation.prompts"), rotation_faults),
)
