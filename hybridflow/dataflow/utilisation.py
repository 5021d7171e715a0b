"""How much of the devices' arithmetic a stage's updates used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hybridflow.dataflow.steps import StepOutcome
from hybridflow.recipe.flops import ModelFlops, Work, peak_flops
from hybridflow.recipe.plan import Plan, Stage


class Utilisation:
    """Model FLOPs of a role's updates over their time: what had to be computed, so neither
    recomputation nor a prompt that is run once more for each response counts.

    Args:
        role: which is trained, such as the actor.
        device: name of a device of it.
    """

    def __init__(self, plan: Plan, stage: Stage, role: str, device: str) -> None:
        recipe = plan.recipe
        path = Path(recipe.model_path(role)) / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        scores = recipe.roles.kinds()[role] == "value"
        self._flops = ModelFlops(config, 1 if scores else config["vocab_size"])
        self._epochs = stage.trained[role].epochs
        # A delayed update's rows are those of a step before.
        nodes = [node for node in stage.graph.nodes if (node.role, node.call) == (role, "update")]
        self._updates = [node for node in nodes if not node.delay]
        self._devices = plan.layouts[role].world
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
