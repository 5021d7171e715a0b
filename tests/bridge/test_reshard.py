"""The reshard plan against counting, element by element."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge import mappings, registry, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard import ReshardPlan, inverse, plan
from megatron_bridge.reshard_moves import move_back, put, read
from tests.bridge import reshard_targets
from tests.bridge.brute_force import tiny_config
from tests.bridge.reshard_counting import Counting

FAMILIES = [
    *("Qwen3ForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "Phi3ForCausalLM"),
    *("GptOssForCausalLM", "DeepseekV3ForCausalLM", "Glm4ForCausalLM", "MixtralForCausalLM"),
]


def resolved(kind: str, **fields: Any) -> dict[str, Any]:
    """A tiny model's config."""
    table = next(table for table in registry.tables() if table.name == kind)
    return translation.resolve(tiny_config(table, **fields))


@st.composite
def trainers(draw: Any, config: dict[str, Any]) -> ParallelLayout:
    """A layout that fits."""
    size = st.sampled_from((1, 2, 4))
    pp = draw(st.sampled_from((1, 2)))
    even = ParallelLayout(
        tp=draw(size),
        pp=pp,
        dp=draw(st.sampled_from((1, 2))),
        ep=draw(size),
        etp=draw(st.sampled_from((None, 1, 2))),
        vpp=draw(st.sampled_from((1, 2))) if pp > 1 else 1,
        first_stage_layers=draw(st.sampled_from((None, 1))) if pp > 1 else None,
    )
    plain = ParallelLayout(tp=even.tp, pp=pp, dp=even.dp)
    return next(one for one in (even, plain, ParallelLayout()) if not one.problems(config))


def check(made: ReshardPlan, counting: Counting) -> None:
    """Each element of the engine once, from every holder; and the way back."""
    for holder in (0, -1):
        engine = [[torch.zeros_like(t) for t in rank] for rank in counting.engine]
        count = [[torch.zeros_like(t) for t in rank] for rank in counting.engine]
        for copy in made.copies:
            held = counting.trainer[copy.holders[holder]][copy.weight]
            values = read(held, copy.source)
            assert values.numel() == copy.elements > 0
            put(engine[copy.target_rank][copy.parameter], copy.target, values)
            for dimension, (start, stop) in enumerate(copy.target):
                assert (
                    0 <= start < stop <= engine[copy.target_rank][copy.parameter].shape[dimension]
                )
            index = tuple(slice(*interval) for interval in copy.target)
            count[copy.target_rank][copy.parameter][index] += 1
        for rank, wanted in enumerate(counting.engine):
            for found, times, tensor in zip(engine[rank], count[rank], wanted, strict=True):
                assert torch.equal(found, tensor)
                assert torch.equal(times, (tensor > 0).long())  # once, and padding never
    order = [(copy.target_rank, copy.parameter, copy.target) for copy in made.copies]
    assert order == sorted(order)


def check_inverse(made: ReshardPlan, counting: Counting) -> None:
    """Backwards the engine's parameters make each trainer rank's tensors, each element once."""
    back = [{i: torch.zeros_like(t) for i, t in held.items()} for held in counting.trainer]
    count = [{i: torch.zeros_like(t) for i, t in held.items()} for held in counting.trainer]
    for copy in inverse(made):
        parameter = counting.engine[copy.target_rank][copy.parameter]
        for holder in copy.holders:
            move_back(copy, parameter, back[holder][copy.weight])
            read(count[holder][copy.weight], copy.source).add_(1)
    for rank, held in enumerate(counting.trainer):
        for index, tensor in held.items():
            assert torch.equal(back[rank][index], tensor)
            assert torch.equal(count[rank][index], (tensor > 0).long())


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_layout_to_any_boxes(data):
    kind = data.draw(st.sampled_from(FAMILIES))
    config = resolved(kind, tie_word_embeddings=data.draw(st.booleans()), num_hidden_layers=3)
    layout = data.draw(trainers(config))
    shapes = mappings.huggingface_shapes(config)
    targets = reshard_targets.scattered(
        shapes, data.draw(st.integers(1, 3)), data.draw(st.integers())
    )
    made, counting = plan(config, layout, targets), Counting(config, layout, targets)
    check(made, counting)
    check_inverse(made, counting)
