"""The latest step as Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from hybridflow.dataflow.control.pulse import StepRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

NAMES: dict[str, tuple[str, str]] = {
    "reward/mean": ("ppo_reward_mean", "mean reward of the step's samples"),
    "reward/std": ("ppo_reward_std", "standard deviation of the step's rewards"),
    "critic/explained_variance": ("critic_explained_variance", "how well values tell returns"),
    "reward/max": ("ppo_reward_max", "largest reward of the step"),
    "eval/reward": ("eval_reward_mean", "mean reward on the held-out rows"),
    "update/kl": ("ppo_kl_divergence", "KL to the reference, nats a token"),
    "reward/kl": ("ppo_kl_divergence", "KL to the reference that the reward pays, nats a token"),
    "update/loss": ("ppo_policy_loss", "loss of the actor"),
    "update/entropy": ("ppo_entropy", "entropy of the policy, nats a token, exact"),
    "update/entropy_estimate": ("ppo_entropy", "entropy of the policy, nats a token, estimated"),
    "update/policy_kl": ("ppo_policy_kl", "KL of the policy before the update to the current one"),
    "update/clip_fraction": ("ppo_clip_fraction", "share of tokens whose ratio was clipped"),
    "update/grad_norm": ("actor_grad_norm", "gradient norm before clipping"),
    "update/lr": ("actor_learning_rate", "of the last optimizer step"),
    "update/rollout_kl": ("rollout_kl_divergence", "KL between rollout and trainer"),
    "length/mean": ("rollout_response_tokens_mean", "mean response length"),
    "length/truncated": ("rollout_truncated_ratio", "share of responses that were cut off"),
    "generate/seconds": ("actor_generation_seconds", "time of sampling in the step"),
    "update/seconds": ("actor_update_seconds", "time of the optimizer steps"),
    "publish/seconds": ("actor_publish_seconds", "time of bringing weights to the servers"),
    "throughput/mfu": ("train_model_flops_utilisation", "of the actor's updates"),
    "throughput/tokens_per_second": ("train_tokens_per_second", "response tokens a second"),
    "weights/version": ("rollout_weight_version", "version that the servers hold"),
}
"""Metrics that have a name of their own; all are in ``hybridflow_metric`` too."""


TOTALS = {
    "hybridflow_steps_total": "steps that this process has ended",
    "hybridflow_response_tokens_total": "tokens that the actor was updated on",
    "hybridflow_reward_errors_total": "samples that a reward function failed on, held-out ones too",
    "hybridflow_reward_timeouts_total": "samples that a reward function was late with, likewise",
}
"""Counters since the process started, of all stages: a series of each stage would lose what happens
when one begins."""


def totals_of(record: StepRecord) -> dict[str, float]:
    """What a step adds to each counter."""
    metrics = record.metrics

    def failed(kind: str) -> float:
        scores = ("reward/", "eval/reward/")
        names = [n for n in metrics if n.startswith(scores) and n.endswith(f"/{kind}")]
        return sum(metrics[name] for name in names)

    added = (1.0, metrics.get("update/tokens", 0.0), failed("errors"), failed("timeouts"))
    return dict(zip(TOTALS, added, strict=True))


def exposition(
    run: str,
    record: StepRecord,
    age: float,
    state: Mapping[str, float],
    latest: Mapping[str, float],
    totals: Mapping[str, float],
) -> str:
    """Every number of the latest step.

    Args:
        latest: the last value of each metric, also of those that not every step has.
        totals: the counters ``TOTALS``.
        age: seconds since it ended.
        state: live values in force.
    """
    labels = {"run": run, "stage": record.stage}
    lines: list[str] = []

    def family(name: str, text: str, samples: Mapping[str, float], label: str = "") -> None:
        lines.extend(_family(name, text, samples, label, labels))

    family("hybridflow_step", "steps that have ended, over all stages", {"": record.global_step})
    family("hybridflow_step_age_seconds", "time since the last step ended", {"": age})
    if record.step:
        family("hybridflow_step_seconds", "wall time of the step", {"": record.seconds})
    known = {**latest, **record.metrics}
    told: set[str] = set()
    for metric, (name, text) in NAMES.items():
        if metric in known and name not in told:
            told.add(name)
            family(name, text, {"": known[metric]})
    for name, value in totals.items():
        lines.extend(_family(name, TOTALS[name], {"": value}, "", {"run": run}, "counter"))
    family("hybridflow_node_seconds", "time of a node", record.node_seconds, "node")
    family("hybridflow_state", "live value in force", state, "name")
    family("hybridflow_metric", "a metric of the step by its name", record.metrics, "name")
    return "\n".join(lines) + "\n"


def _family(
    name: str,
    text: str,
    samples: Mapping[str, float],
    label: str,
    labels: Mapping[str, str],
    kind: str = "gauge",
) -> Iterator[str]:
    if not samples:
        return
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for key, value in samples.items():
        told = {**labels, label: key} if label else labels
        pairs = ",".join(f'{k}="{_escaped(v)}"' for k, v in told.items())
        yield f"{name}{{{pairs}}} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
