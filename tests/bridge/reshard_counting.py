"""A reshard checked by counting: every element of the checkpoint numbered, every rank's loaded.

Trainers' tensors are read as live models read them, engines' are cut out of whole tensors; no
arithmetic of the plan takes part.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_bridge import mappings, regions, registry, sharding
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reading import read_megatron
from megatron_bridge.reshard import TargetParameter
from megatron_bridge.source import Ranges, TensorInfo


class Numbered:
    """A HuggingFace checkpoint of which each element is its own number, from 1."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.held, self.count = {}, 0
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            numbers = torch.arange(self.count + 1, self.count + size + 1)
            self.held[name] = numbers.reshape(shape)
            self.count += size

    def tensors(self) -> dict[str, TensorInfo]:
        """As a source says them."""
        return {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in self.held.items()}

    def read(self, name: str, ranges: Ranges) -> torch.Tensor:
        """A box of a tensor."""
        return self.held[name][regions.slices(ranges)]


class Counting:
    """A model of ``config`` (resolved) on a trainer and one engine, all elements numbered from 1.

    Attributes:
        trainer: by rank, the tensors by the index of their weight; padding is 0.
        engine: by rank, the parameters; padding is 0.
    """

    def __init__(
        self,
        config: dict[str, Any],
        layout: ParallelLayout,
        targets: Sequence[Sequence[TargetParameter]],
    ) -> None:
        self._weights = mappings.weights(config)
        self.source = Numbered(mappings.shapes_of(self._weights))
        experts = registry.architecture(config).sizes(config).get("expert", 0)
        self._where = sharding.Placement(layout, config["num_hidden_layers"], experts)
        self._loaded: dict[tuple[int, int], torch.Tensor] = {}
        self.trainer = [self._load(rank) for rank in range(layout.world)]
        self.engine = [[self._cut(parameter) for parameter in rank] for rank in targets]
        self._on = [self._numbers(tensors.values()) for tensors in self.trainer]

    def _load(self, rank: int) -> dict[int, torch.Tensor]:
        found = {}
        for index, weight in enumerate(self._weights):
            held = self._where.place(weight, rank)
            if held is not None:
                found[index] = self._tensor(index, held[1])
        return found

    def _tensor(self, index: int, place: int) -> torch.Tensor:
        if (index, place) not in self._loaded:
            weight = self._weights[index]
            parts = self._where.tensor_parallel(weight)
            tensor = torch.zeros(sharding.local_shape(weight, parts), dtype=torch.int64)
            for holding in sharding.holdings(weight, parts, place):
                rows = tensor[holding.rows[0] : holding.rows[1]]
                rows.view(regions.lengths(holding.box)).copy_(
                    read_megatron(self.source, weight, holding.box)
                )
            self._loaded[index, place] = tensor
        return self._loaded[index, place]

    def _cut(self, parameter: TargetParameter) -> torch.Tensor:
        made = torch.zeros(parameter.shape, dtype=torch.int64)
        for fill in parameter.fills:
            values = self.source.held[fill.source]
            for dimension, (start, stop) in enumerate(fill.source_box):
                values = values.narrow(dimension, start, stop - start)
            target = made
            for dimension, (start, stop) in enumerate(fill.target_box):
                target = target.narrow(dimension, start, stop - start)
            target.copy_(values.reshape(target.shape))
        return made

    def _numbers(self, tensors: Any) -> np.ndarray:
        """Which numbers these tensors hold; padding's 0 is none."""
        found = np.zeros(self.source.count + 1, dtype=bool)
        for tensor in tensors:
            found[tensor.numpy().ravel()] = True
        found[0] = False
        return found

    def holders(self, numbers: torch.Tensor) -> tuple[int, ...]:
        """Trainer ranks that hold all of these numbers."""
        wanted = numbers.numpy().ravel()
        return tuple(rank for rank, held in enumerate(self._on) if held[wanted].all())

    def missing(self, rank: int, beside: Sequence[int]) -> int:
        """Elements that an engine's rank keeps and none of the trainer ranks ``beside`` it."""
        held = np.zeros(self.source.count + 1, dtype=bool)
        for other in beside:
            held |= self._on[other]
        kept = np.concatenate([tensor.numpy().ravel() for tensor in self.engine[rank]])
        return int(((kept > 0) & ~held[kept]).sum())
