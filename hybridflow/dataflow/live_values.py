"""The live values of a run, with their bounds. A new one is one entry here."""

from __future__ import annotations

from hybridflow.dataflow.state import LiveValue
from hybridflow.recipe.compile import Plan
from hybridflow.recipe.ranges import LARGEST
from hybridflow.recipe.schema_roles import SamplingSection

_RUNS = "the run itself counts it"
_OLDER_SAMPLES = "a node takes samples of earlier steps, which were drawn as it was then"
_NO_KL = "algorithm.kl.coef is 0 in the recipe, so nothing computes the KL"


def live_values(plan: Plan) -> list[LiveValue]:
    """Every value that may change between steps, from where the recipe lets it begin."""
    algorithm, rollout = plan.recipe.algorithm, plan.recipe.roles.rollout
    no_kl = "" if algorithm.kl.coef else _NO_KL
    nodes = [node for stage in plan.stages for node in stage.graph.nodes]
    older = _OLDER_SAMPLES if any(node.delay for node in nodes) else ""
    rate, fastest = plan.stages[0].optimizer.lr, max(s.optimizer.lr for s in plan.stages)
    coef = algorithm.kl.coef
    least = min(1e-6, coef) if algorithm.kl.adaptive else 0  # times anything, 0 stays 0
    return [
        LiveValue("step", 0, 0, LARGEST, "steps that have ended, over all stages", fixed=_RUNS),
        LiveValue("weight_version", 0, 0, LARGEST, "version that the servers hold", fixed=_RUNS),
        LiveValue("actor_lr", rate, 0, max(1.0, fastest), "peak of the actor's learning rate"),
        LiveValue("kl_coef", coef, least, max(100.0, coef), "weight of the KL", fixed=no_kl),
        *([] if rollout is None else _of_sampling(rollout.sampling, older)),
    ]


def _of_sampling(sampling: SamplingSection, older: str) -> list[LiveValue]:
    """``older``: why the temperature is fixed, if it is."""
    tokens, heat = sampling.max_tokens, sampling.temperature
    return [
        LiveValue(
            "temperature", heat, min(0.01, heat), max(10.0, heat), "of sampling", fixed=older
        ),
        LiveValue("top_p", sampling.top_p, min(0.01, sampling.top_p), 1, "mass to draw from"),
        LiveValue("top_k", sampling.top_k, -1, LARGEST, "tokens to draw from; -1: all", (0,)),
        LiveValue("max_tokens", tokens, 1, tokens, "most tokens of a response"),
    ]
