"""The rounds of a step's ``repeat_until``: what all of them sampled, and what of it was kept."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages import has_spread
from hybridflow.batch import Batch, Ragged
from hybridflow.dataflow.fields import Fields, Value
from hybridflow.dataflow.steps import StepOutcome
from hybridflow.recipe.axes import Axis
from hybridflow.recipe.graph import Graph, Node

SAMPLING = "sampling/"
"""Before the names of what all rounds of a step sampled, kept or not."""
_OF_ALL = ("/errors", "/timeouts", "/constant")
"""Ends of names that stand for all samples under their own name, so that nothing escapes."""


def all_rounds(graph: Graph, outcome: StepOutcome) -> StepOutcome:
    """The step as if the loop's nodes had run once, over the rows of all rounds.

    The node that ends the loop keeps its last result, which gathers those before.
    """
    if len(outcome.rounds) < 2:
        return outcome
    whole = StepOutcome(outcome.context, Fields(), dict(outcome.results), outcome.timings)
    for name in outcome.fields.names():
        whole.fields.put(name, outcome.fields[name])
    inner = [n for n in graph.nodes if n.name in outcome.rounds[0].results and not n.repeat_until]
    for node in inner:
        whole.results[node.name] = Batch.concat([r.results[node.name] for r in outcome.rounds])
    for field in {f for n in inner for f in (*n.inputs.values(), *n.outputs.values())}:
        values = [r.fields[field] for r in outcome.rounds if field in r.fields]
        if len(values) == len(outcome.rounds):
            whole.fields.put(field, _joined(values))
    return whole


def _joined(values: list[Value]) -> Value:
    first = values[0]
    if first.axis is Axis.RUN:
        return values[-1]
    samples = first.samples_per_prompt
    parts = [Batch({"v": v.data}, {"v": v.axis}, v.prompts, samples or 1) for v in values]
    whole = Batch.concat(parts)
    return Value(first.axis, whole["v"], whole.prompts, samples)


def of_sampling(found: dict[str, float]) -> dict[str, float]:
    """``found``, in which rewards and lengths of training stand under ``sampling/``."""
    renamed = {
        name: f"{SAMPLING}{name}"
        for name in found
        if name.startswith(("reward/", "length/")) and not name.endswith(_OF_ALL)
    }
    return {renamed.get(name, name): value for name, value in found.items()}


def round_metrics(loop: Node, outcome: StepOutcome, whole: StepOutcome) -> dict[str, float]:
    """How many rounds a step took, over how many prompts, and at what share of these the samples'
    rewards differ."""
    found = {f"{SAMPLING}rounds": float(len(outcome.rounds))}
    field = loop.inputs.get("rewards")
    if field is not None and field in whole.fields:
        rewards = whole.fields[field]
        signal_P = has_spread(rewards.data.reshape(rewards.prompts, -1))
        found[f"{SAMPLING}prompts"] = float(rewards.prompts)
        found[f"{SAMPLING}signal_share"] = signal_P.float().mean().item()
    return found


def kept_metrics(loop: Node, outcome: StepOutcome) -> dict[str, float]:
    """Rewards and lengths of the samples that the loop kept: those that are trained on."""
    kept = outcome.results[loop.name]
    found = reward_metrics(kept["kept_rewards"]) if "kept_rewards" in kept else {}
    if "kept_responses" in kept:
        finished = kept.fields.get("kept_finished")
        found |= length_metrics("length", kept["kept_responses"], finished)
    return found


def reward_metrics(rewards_S: Tensor) -> dict[str, float]:
    """Of the rewards that are trained on."""
    if not len(rewards_S):
        return {}
    rewards_S = rewards_S.double()  # a mean in float32 may lie above the largest
    return {
        "reward/mean": rewards_S.mean().item(),
        "reward/std": rewards_S.std(unbiased=False).item(),
        "reward/max": rewards_S.max().item(),
        "reward/min": rewards_S.min().item(),
    }


def length_metrics(prefix: str, responses: Ragged, finished_S: Tensor | None) -> dict[str, float]:
    """Response tokens, and the share of responses that were cut off."""
    lengths_S = responses.lengths.float()
    found = {
        f"{prefix}/mean": lengths_S.mean().item(),
        f"{prefix}/max": lengths_S.max().item(),
        f"{prefix}/min": lengths_S.min().item(),
    }
    if finished_S is not None:
        found[f"{prefix}/truncated"] = 1 - finished_S.float().mean().item()
    return found
