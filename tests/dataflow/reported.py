"""What a step of every algorithm must report."""

from collections.abc import Mapping

from hybridflow.algorithms import LOSSES
from hybridflow.recipe.graph import Graph
from hybridflow.recipe.plan import ACTOR

_ALWAYS = (
    *(f"reward/{name}" for name in ("mean", "std", "max", "min", "constant")),
    *(f"length/{name}" for name in ("mean", "min", "max", "truncated")),
    *(f"advantage/{name}" for name in ("mean", "std", "min", "max", "abs_mean", "zero_share")),
    *(f"update/{name}" for name in ("loss", "grad_norm", "lr", "tokens", "skipped_steps")),
    *(f"update/rollout_{name}" for name in ("gap_mean", "gap_max", "gap_share", "kl")),
    *("update/entropy_estimate", "generate/seconds", "update/seconds", "weights/version"),
    *("throughput/tokens_per_second", "throughput/update_tflops"),
)
_CRITIC = ("loss", "explained_variance", "clip_fraction", "value_mean", "grad_norm", "lr")


def assert_reported(metrics: Mapping[str, float], graph: Graph) -> None:
    """A step that trains the actor and every critic of the graph has the metrics of each."""
    wanted = set(_ALWAYS)
    for node in (node for node in graph.nodes if node.call == "update"):
        if node.role == ACTOR:
            wanted |= {f"update/{name}" for name in LOSSES[str(node.options["loss"])].metrics}
            if "old_logprobs" in node.inputs:
                wanted |= {"update/policy_kl", "update/old_gap_mean"}
            if "ref_logprobs" in node.inputs:
                wanted.add("update/kl")
        elif "returns" in node.inputs:
            wanted |= {f"{node.role}/{name}" for name in _CRITIC}
        else:
            wanted |= {f"{node.role}/{name}" for name in ("loss", "grad_norm", "lr")}
    if any(node.repeat_until is not None for node in graph.nodes):
        wanted |= {f"sampling/{name}" for name in ("rounds", "prompts", "signal_share")}
        wanted |= {"sampling/reward/mean", "sampling/length/truncated"}
    missing = sorted(wanted - set(metrics))
    assert not missing, missing
