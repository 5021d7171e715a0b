"""The values of one step: every field of the graph, under its own name."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any

from hybridflow.batch import Batch
from hybridflow.recipe.axes import Axis


@dataclass(frozen=True)
class Value:
    """One field's data with the batch shape it belongs to.

    ``prompts`` is P; ``samples_per_prompt`` is G, or None where no row stands for a sample
    yet (prompts that were not generated from).
    """

    axis: Axis
    data: Any
    prompts: int = 0
    samples_per_prompt: int | None = None


class Fields:
    """Field values by name, safe to fill from several threads at once."""

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}
        self._lock = Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def names(self) -> list[str]:
        return list(self._values)

    def copy(self) -> Fields:
        """The same values, which what is put into one or the other does not change."""
        same = Fields()
        same._values = dict(self._values)
        return same

    def put(self, name: str, value: Value) -> None:
        with self._lock:
            self._values[name] = value

    def batch(self, inputs: dict[str, str]) -> Batch:
        """The node's batch: the fields of ``inputs`` (parameter -> field) that exist."""
        held = {param: self._values[f] for param, f in inputs.items() if f in self._values}
        rows = [value for value in held.values() if value.axis is not Axis.RUN]
        prompts = {value.prompts for value in rows}
        samples = {v.samples_per_prompt for v in rows if v.samples_per_prompt is not None}
        if len(prompts) > 1 or len(samples) > 1:
            shapes = {inputs[p]: (v.prompts, v.samples_per_prompt) for p, v in held.items()}
            raise ValueError(f"fields of different batches meet in one node: {shapes}")
        return Batch(
            {param: value.data for param, value in held.items()},
            {param: value.axis for param, value in held.items()},
            prompts=prompts.pop() if prompts else 0,
            samples_per_prompt=samples.pop() if samples else 1,
        )

    def store(self, outputs: dict[str, str], batch: Batch) -> None:
        """Keep the outputs of a node (parameter -> field) from the batch it returned."""
        for param, field in outputs.items():
            axis = batch.axes[param]
            samples = batch.samples_per_prompt if axis in (Axis.SAMPLES, Axis.TOKENS) else None
            self.put(field, Value(axis, batch[param], batch.prompts, samples))
