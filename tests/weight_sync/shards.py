"""A checkpoint as trainer ranks hold it, without a process group, and engines that take it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybridflow.weight_sync.layout import server_parameters
from megatron_bridge import mappings, regions, registry, reshard, sharding, translation
from megatron_bridge.huggingface.folder import HuggingFaceFolder
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reading import read_megatron
from megatron_bridge.reshard import ReshardPlan, Routes, Seat

HERE = Seat("here", None)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, resolved."""
    return translation.resolve(json.loads((folder / "config.json").read_text()))


def trainer_tensors(folder: Path, layout: ParallelLayout) -> list[dict[int, torch.Tensor]]:
    """Each trainer rank's tensors by the index of their weight."""
    config = read_config(folder)
    source = HuggingFaceFolder(folder)
    weights = mappings.weights(config)
    experts = registry.architecture(config).sizes(config).get("expert", 0)
    where = sharding.Placement(layout, config["num_hidden_layers"], experts)

    def tensor(weight: Any, place: int) -> torch.Tensor:
        parts = where.tensor_parallel(weight)
        dtype = source.tensors()[weight.parts[0].name].dtype
        made = torch.zeros(sharding.local_shape(weight, parts), dtype=dtype)
        for holding in sharding.holdings(weight, parts, place):
            rows = made[holding.rows[0] : holding.rows[1]]
            box = read_megatron(source, weight, holding.box)
            rows.view(regions.lengths(holding.box)).copy_(box)
        return made

    return [
        {
            index: tensor(weight, held[1])
            for index, weight in enumerate(weights)
            if (held := where.place(weight, rank)) is not None
        }
        for rank in range(layout.world)
    ]


def planned(folder: Path, layout: ParallelLayout, tp: int, dtype: str = "float32") -> ReshardPlan:
    """The plan to an engine of ``tp`` ranks on the CPU."""
    config = read_config(folder)
    targets = [server_parameters(config, tp=tp, rank=rank) for rank in range(tp)]
    return reshard.plan(config, layout, targets, dtype=dtype)


def routed(plan: ReshardPlan, engines: int = 1, elsewhere: Sequence[int] = ()) -> Routes:
    """All on one host, but for the trainer ranks ``elsewhere``."""
    ranks = range(plan.layout.world)
    trainer = [Seat("elsewhere", None) if rank in elsewhere else HERE for rank in ranks]
    return reshard.route(plan, trainer, [[HERE] * plan.ranks for _ in range(engines)])
