"""Memory that a rollout takes over between two updates, and what comes back of it."""

from typing import Any

import pytest
import torch

from hybridflow.batch import Batch
from megatron_bridge.layout import ParallelLayout
from tests.megatron.cases import GRPO, make_batch, make_engine, my_part
from tests.ranks import run_ranks

ONE, DP2 = ParallelLayout(), ParallelLayout(dp=2)


def updates(path: str, layout: ParallelLayout, batch: Batch, switch: bool) -> dict[str, Any]:
    """Three updates, with the memory given up (twice in a row) between them or not."""
    engine, part = make_engine(path, layout), my_part(batch, layout)
    memories, buffers = [], []
    for _ in range(3):
        engine.update(part, GRPO)
        if switch:
            memories += [engine.switch_to_rollout(), engine.switch_to_rollout()]
            model: Any = engine._model
            buffers += [b.grad_data.untyped_storage().nbytes() for b in model.buffers]
    weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
    return {"weights": weights, "memories": memories, "buffers": buffers}


@pytest.mark.parametrize("layout", [ONE, DP2], ids=str)
def test_updates_around_a_rollout_are_the_same_bits(tiny_qwen3: str, layout: ParallelLayout):
    batch = make_batch()
    (given, *_) = run_ranks(updates, layout.world, tiny_qwen3, layout, batch, True)
    (expected, *_) = run_ranks(updates, layout.world, tiny_qwen3, layout, batch, False)
    for name, tensor in expected["weights"].items():
        assert torch.equal(given["weights"][name], tensor), name
    assert given["buffers"] == [0] * len(given["buffers"]) and given["buffers"]
    gradients = sum(tensor.numel() for tensor in expected["weights"].values()) * 4
    for memory in given["memories"]:
        assert memory.released >= gradients
        assert 0 < memory.held <= memory.peak
