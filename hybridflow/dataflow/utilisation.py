"""How much of the devices' arithmetic an update of the actor used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hybridflow.dataflow.steps import StepOutcome
from hybridflow.recipe.compile import ACTOR, Plan, Stage
from hybridflow.recipe.flops import ModelFlops, Work, peak_flops


class Utilisation:
    """Model FLOPs of the actor's updates over their time: what had to be computed, so neither
    recomputation nor a prompt that is run once more for each response counts.

    Args:
        device: name of a device of the actor.
    """

    def __init__(self, plan: Plan, stage: Stage, device: str) -> None:
        recipe = plan.recipe
        config = json.loads((Path(recipe.model.path) / "config.json").read_text(encoding="utf-8"))
        self._flops = ModelFlops(config)
        self._epochs = stage.trained[ACTOR].epochs
        # A delayed update's rows are those of a step before.
        nodes = [node for node in stage.graph.nodes if (node.role, node.call) == (ACTOR, "update")]
        self._updates = [node for node in nodes if not node.delay]
        self._devices = plan.layouts[ACTOR].world
        told = recipe.cluster.peak_tflops
        self._peak = told * 1e12 if told else peak_flops(device, recipe.model.dtype)

    def metrics(self, outcome: StepOutcome) -> Mapping[str, float]:
        """``throughput/update_tflops`` a device, and ``throughput/mfu`` where its peak is known."""
        done, seconds = 0.0, 0.0
        for node in self._updates:
            if node.name not in outcome.results:
                continue
            fields = [outcome.fields[node.inputs[name]].data for name in ("prompts", "responses")]
            prompts, responses = (data.lengths.tolist() for data in fields)
            done += self._epochs * self._flops.training(Work.of(prompts, responses))
            seconds += outcome.timings.seconds[node.name]
        if not done or not seconds:
            return {}
        rate = done / seconds / self._devices
        found = {"throughput/update_tflops": rate / 1e12}
        return found | ({"throughput/mfu": rate / self._peak} if self._peak else {})
