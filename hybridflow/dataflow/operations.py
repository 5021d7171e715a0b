"""What each node of a graph does: a call on a role's group, or a function here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hybridflow.algorithms import FUNCTIONS, FunctionContext, staleness
from hybridflow.algorithms.functions import GaeSettings
from hybridflow.algorithms.values import explained_variance
from hybridflow.batch import Batch
from hybridflow.dataflow.soundness import old_is_current, require_sound
from hybridflow.dataflow.steps import Operation, StepContext
from hybridflow.dataflow.team import Team
from hybridflow.recipe.axes import Axis
from hybridflow.recipe.catalogue import SCORE_LOSSES, signature
from hybridflow.recipe.graph import Node
from hybridflow.recipe.plan import Stage
from hybridflow.recipe.schema import Recipe
from hybridflow.workers.model import ModelWorker

SCORE_GRACE_SECONDS = 120.0
"""After a reward role's own deadline: for ending processes, and for texts and tensors."""


class CheckpointWriter(Protocol):
    """Saves the run after a step; returns the checkpoint's folder."""

    def __call__(self, context: StepContext) -> str: ...


@dataclass(frozen=True)
class Surroundings:
    """What operations act on; ``tell`` keeps an event of a kind."""

    recipe: Recipe
    stage: Stage
    team: Team
    save: CheckpointWriter
    tell: Callable[[str, str], None]


def operations(around: Surroundings) -> dict[str, Operation]:
    """An operation for each node of the stage's graph."""
    return {node.name: _operation(node, around) for node in around.stage.graph.nodes}


def _operation(node: Node, around: Surroundings) -> Operation:
    """What the node does, its outputs held against its signature."""
    kind = None if node.role is None else around.team.kinds[node.role]
    known = signature(kind, node.call or node.function)
    assert known is not None, f"unknown call in a checked graph: {node.action}"
    call = _call_function if kind is None else CALLS[kind, str(node.call)]

    def run(batch: Batch, context: StepContext) -> Batch:
        if known.compares_samples and batch.samples_per_prompt < 2:
            raise ValueError(
                f"{node.action} compares samples of a prompt, and each has "
                f"{batch.samples_per_prompt}; set data.samples_per_prompt to 2 or more"
            )
        result = call(node, around, batch, context)
        require_sound(node.name, known.outputs, result)
        return result

    return run


def _call_function(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    known = signature(None, node.function)
    assert known is not None, f"unknown function in a checked graph: {node.function}"
    algorithm, state = around.recipe.algorithm, around.team.state
    gae = algorithm.gae
    told = FunctionContext(
        step=context.step - 1,
        seed=around.recipe.seed,
        normalize_by_std=algorithm.normalize_by_std,
        prompts_per_step=around.stage.prompts_per_step,
        max_tokens=int(state["max_tokens"]) if "max_tokens" in state else 0,
        preference_beta=algorithm.preference.beta,
        previous=context.previous,
        kl_coef=state["kl_coef"] if algorithm.kl.place == "reward" else 0.0,
        kl_estimator=algorithm.kl.estimator,
        multiplier=0.0 if algorithm.lagrangian is None else state["lambda"],
        gae=GaeSettings() if gae is None else GaeSettings(**gae.model_dump()),
    )
    data = FUNCTIONS[str(node.function)](batch, told, **node.options)
    axes = {name: known.outputs[name].axis for name in data}
    prompts = next((len(data[n]) for n, a in axes.items() if a is Axis.PROMPTS), batch.prompts)
    return Batch(data, axes, prompts, batch.samples_per_prompt)


def _generate(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    recipe = around.recipe
    way = node.options.get("sampling", "training")
    if way == "evaluation":
        assert recipe.evaluation is not None, "evaluation nodes are off without the section"
        samples = recipe.evaluation.samples_per_prompt
        temperature = recipe.evaluation.temperature
    elif way == "greedy":
        samples, temperature = 1, 0.0
    else:
        samples = around.stage.samples_per_prompt
        temperature = around.team.state["temperature"]
    seed = recipe.seed * 7_919 + context.global_step * 104_729 + context.round * 15_485_863
    seed = (seed + _place(node, around.stage) * 32_452_843) % 2**31
    sampling = around.team.sampling(temperature, seed)
    around.team.make_room()
    return around.team.rollout.generate(batch, samples, sampling)


def _place(node: Node, stage: Stage) -> int:
    """How many nodes of the stage that sample in the same way come before: others of the same
    prompts must not draw the same responses."""
    way = node.options.get("sampling", "training")
    samplers = [n for n in stage.graph.nodes if n.call == "generate"]
    return [n.name for n in samplers if n.options.get("sampling", "training") == way].index(
        node.name
    )


def _score(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    role = str(node.role)
    section = around.recipe.roles.rewards()[role]
    # Nodes of one role may be called at once, and its workers serve them one after the other.
    nodes = sum(other.role == role for other in around.stage.graph.nodes)
    seconds = nodes * section.timeout_seconds + SCORE_GRACE_SECONDS
    result, repaired = around.team.rewards.score(role, batch, seconds)
    if repaired:
        around.tell("repair", f"step {context.step}: {repaired}")
    group = around.team.groups[role]
    if (text := around.team.rewards.failed.see(role, group, result)) is not None:
        around.tell("warning", f"step {context.step}: {text}")
    return result


def _logprobs(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    temperature = around.team.temperature(around.stage, node)
    return around.team.groups[str(node.role)].run(ModelWorker.logprobs, batch, temperature)


def _hidden(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    return around.team.groups[str(node.role)].run(ModelWorker.hidden, batch)


def _update(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    role = str(node.role)
    loss = around.team.loss(around.stage, node)
    if old_is_current(around.stage.graph, node):
        loss = replace(loss, old_bound=around.recipe.old_bound)
    behind: dict[str, float] = {}
    if "token_versions" in batch and around.stage.generates:
        versions, allowed = batch["token_versions"], around.recipe.roles.servers.max_staleness
        staleness.require(versions, around.team.version, allowed)
        behind = staleness.staleness_metrics(versions, around.team.version)
    return _of_run("metrics", {**around.team.update(role, batch, loss), **behind})


def _score_by_model(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    told = batch.select(["prompts", "responses"])
    return around.team.groups[str(node.role)].run(
        ModelWorker.score, told, node.options.get("pooling", "last")
    )


def _values(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    return around.team.groups[str(node.role)].run(ModelWorker.values, batch)


def _update_values(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    role = str(node.role)
    loss = around.team.value_loss(around.stage, role, node.options["loss"])
    scores = loss.name in SCORE_LOSSES
    method = ModelWorker.update_scores if scores else ModelWorker.update_values
    metrics = around.team.groups[role].run(method, batch, loss)
    if "values" in batch:
        found = explained_variance(batch["values"].values, batch["returns"].values)
        metrics = {**metrics, "explained_variance": found}
    return _of_run("metrics", metrics)


def _evaluate(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    loss = around.team.loss(around.stage, node)
    return _of_run("metrics", around.team.evaluate(str(node.role), batch, loss))


def _evaluate_scores(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    role = str(node.role)
    loss = around.team.value_loss(around.stage, role, node.options["loss"])
    metrics = around.team.groups[role].run(ModelWorker.evaluate_scores, batch, loss)
    return _of_run("metrics", metrics)


def _publish(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    version = around.team.publish()
    return _of_run("weight_version", version)


def _save(node: Node, around: Surroundings, batch: Batch, context: StepContext) -> Batch:
    return _of_run("checkpoint", around.save(context))


def _of_run(name: str, data: Any) -> Batch:
    return Batch({name: data}, {name: Axis.RUN})


CALLS: dict[tuple[str, str], Callable[..., Batch]] = {
    ("rollout", "generate"): _generate,
    ("reward", "score"): _score,
    ("model", "logprobs"): _logprobs,
    ("model", "hidden"): _hidden,
    ("model", "update"): _update,
    ("model", "evaluate"): _evaluate,
    ("value", "values"): _values,
    ("value", "score"): _score_by_model,
    ("value", "update"): _update_values,
    ("value", "evaluate"): _evaluate_scores,
    ("value", "save"): _save,
    ("model", "publish"): _publish,
    ("model", "save"): _save,
}
