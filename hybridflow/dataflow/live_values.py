"""The live values of a run, with their bounds. A new one is one entry here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hybridflow.dataflow.state import LiveValue
from hybridflow.recipe.plan import ACTOR, Plan
from hybridflow.recipe.ranges import LARGEST
from hybridflow.recipe.schema_algorithm import LagrangianSection
from hybridflow.recipe.schema_roles import SamplingSection

_RUNS = "the run itself counts it"
_OLDER_SAMPLES = "a node takes samples of earlier steps, which were drawn as it was then"
_NO_KL = "algorithm.kl.coef is 0 in the recipe, so nothing computes the KL"

_NO_BONUS = "no update of the recipe is of sampled tokens, so nothing reads it"


def live_values(plan: Plan) -> list[LiveValue]:
    """Every value that may change between steps, from where the recipe lets it begin."""
    algorithm, rollout = plan.recipe.algorithm, plan.recipe.roles.rollout
    no_kl = "" if algorithm.kl.coef else _NO_KL
    nodes = [node for stage in plan.stages for node in stage.graph.nodes]
    older = _OLDER_SAMPLES if any(node.delay for node in nodes) else ""
    samples = any(stage.generates and ACTOR in stage.trained for stage in plan.stages)
    buffers = [n.options.get("buffer") or 1 for n in nodes if n.function == "soft_overlong"]
    coef, bonus = algorithm.kl.coef, algorithm.entropy_coef
    least = min(1e-6, coef) if algorithm.kl.adaptive else 0  # times anything, 0 stays 0
    run, actor = partial(LiveValue, fixed=_RUNS), partial(LiveValue, role="actor")
    return [
        run("step", 0, 0, LARGEST, "steps that have ended, over all stages"),
        run("weight_version", 0, 0, LARGEST, "version that the servers hold"),
        *_rates(plan),
        actor("kl_coef", coef, least, max(100.0, coef), "weight of the KL", fixed=no_kl),
        actor(
            "entropy_coef",
            bonus,
            0,
            max(10.0, bonus),
            "weight of the entropy",
            fixed="" if samples else _NO_BONUS,
        ),
        *([] if algorithm.lagrangian is None else [_multiplier(algorithm.lagrangian)]),
        *(
            []
            if rollout is None
            else _of_sampling(rollout.sampling, older, max(buffers, default=1))
        ),
    ]


def _of_sampling(sampling: SamplingSection, older: str, shortest: int) -> list[LiveValue]:
    """``older``: why the temperature is fixed, if it is; ``shortest``: least ``max_tokens``, which
    hold the buffer in which long responses are punished."""
    tokens, heat, mass = sampling.max_tokens, sampling.temperature, sampling.top_p
    rollout = partial(LiveValue, role="rollout")
    return [
        rollout("temperature", heat, min(0.01, heat), max(10.0, heat), "of logits", fixed=older),
        rollout("top_p", mass, min(0.01, mass), 1, "mass of tokens to draw from"),
        rollout("top_k", sampling.top_k, -1, LARGEST, "tokens to draw from; -1: all", (0,)),
        rollout("max_tokens", tokens, shortest, tokens, "most tokens of a response"),
    ]


def _multiplier(told: LagrangianSection) -> LiveValue:
    low, high = min(1e-4, told.start), max(told.start, told.maximum)
    return LiveValue("lambda", told.start, low, high, "weight of costs", role="actor")


def _rates(plan: Plan) -> Iterator[LiveValue]:
    """The learning rate of every model that some stage trains."""
    for role in dict.fromkeys(role for stage in plan.stages for role in stage.trained):
        rates = [s.trained[role].optimizer.lr for s in plan.stages if role in s.trained]
        top = max(1.0, *rates)
        yield LiveValue(f"{role}_lr", rates[0], 0, top, "peak of the learning rate", role=role)
