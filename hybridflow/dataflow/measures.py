"""Metrics that the driver makes of a step's fields: advantages, KL, rewards by source."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.kl import kl_divergence
from hybridflow.batch import Ragged
from hybridflow.dataflow.steps import StepOutcome
from hybridflow.recipe.graph import Graph, Node

MOST_SOURCES = 32
"""Values of the source column that get a metric; further ones count as ``other``."""


def advantage_metrics(update: Node, outcome: StepOutcome) -> dict[str, float]:
    """Of the advantages that an update took; by sample, or by token where they differ there.

    ``zero_share`` is the share of zeros: at 1 the step has learnt nothing from its rewards.
    """
    field = update.inputs.get("advantages")
    if field is None or field not in outcome.fields:
        return {}
    data = outcome.fields[field].data
    values: Tensor = (data.values if isinstance(data, Ragged) else data).double()
    if not len(values):
        return {}
    return {
        "advantage/mean": values.mean().item(),
        "advantage/std": values.std(unbiased=False).item(),
        "advantage/min": values.min().item(),
        "advantage/max": values.max().item(),
        "advantage/abs_mean": values.abs().mean().item(),
        "advantage/zero_share": (values == 0).double().mean().item(),
    }


def reference_kl(graph: Graph, outcome: StepOutcome) -> dict[str, float]:
    """``reward/kl``: the KL in nats a token (k3) of a function that charges it to the reward."""
    for node in graph.nodes:
        names = [node.inputs.get(name) for name in ("logprobs", "ref_logprobs")]
        if node.function is None or node.name not in outcome.results:
            continue
        if "kl_baseline" in node.outputs:
            continue  # of answers to other prompts, and charged to no reward
        if all(name is not None and name in outcome.fields for name in names):
            mine, reference = (outcome.fields[str(name)].data.values for name in names)
            if len(mine):
                return {"reward/kl": kl_divergence(mine, reference).mean().item()}
    return {}


def source_means(
    score: Node, outcome: StepOutcome, column: str, prefix: str, seen: list[str]
) -> dict[str, float]:
    """``prefix/source/NAME``: the mean reward of the prompts of each value of a column.

    Args:
        seen: values that have a metric, in the order of their first step; new ones are added while
            there is room, so that a value is the same curve in every step.
    """
    result = outcome.results[score.name]
    answers = score.inputs.get("answers", "")  # a model that scores reads none
    rows = outcome.fields[answers].data if answers in outcome.fields else []
    if len(rows) != result.prompts or not rows:
        return {}
    names = [str(row.get(column, "none")) for row in rows]
    new = [name for name in sorted(set(names)) if name not in seen]
    seen.extend(new[: max(MOST_SOURCES - 1 - len(seen), 0)])
    shown = [name if name in seen else "other" for name in names]
    known = sorted(set(shown))
    owner_P = torch.tensor([known.index(name) for name in shown])
    rewards_P = result["rewards"].view(result.prompts, -1).double().mean(dim=1)
    sums = torch.zeros(len(known), dtype=torch.float64).index_add(0, owner_P, rewards_P)
    counts = torch.bincount(owner_P, minlength=len(known))
    return {
        f"{prefix}/source/{name}": (total / count).item()
        for name, total, count in zip(known, sums, counts, strict=True)
    }
