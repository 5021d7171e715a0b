"""The reshard plan against counting, element by element."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge import mappings, registry, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard import Fill, ReshardPlan, TargetParameter, inverse, plan
from megatron_bridge.reshard_moves import move, move_back, put, read
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
    # What is tried first is what asks most.
    size = st.sampled_from((2, 4, 1))
    pp = draw(st.sampled_from((2, 1)))
    even = ParallelLayout(
        tp=draw(size),
        pp=pp,
        dp=draw(st.sampled_from((2, 1))),
        ep=draw(size),
        etp=draw(st.sampled_from((1, None, 2))),
        vpp=draw(st.sampled_from((1, 2))) if pp > 1 else 1,
        first_stage_layers=draw(st.sampled_from((1, None))) if pp > 1 else None,
    )
    dense = replace(even, ep=1, etp=None)
    plain = ParallelLayout(tp=even.tp, pp=pp, dp=even.dp)
    tries = (even, dense, plain, replace(plain, tp=2), replace(plain, pp=1), ParallelLayout())
    return next(one for one in tries if not one.problems(config))


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


@pytest.mark.parametrize("kind", FAMILIES)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_any_layout_to_any_boxes(kind, data):
    config = resolved(kind, tie_word_embeddings=data.draw(st.booleans()), num_hidden_layers=3)
    layout = data.draw(trainers(config))
    shapes = mappings.huggingface_shapes(config)
    ranks, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 99))
    targets = reshard_targets.scattered(shapes, ranks, seed)
    made, counting = plan(config, layout, targets), Counting(config, layout, targets)
    check(made, counting)
    check_holders(made, counting)
    check_inverse(made, counting)


def check_holders(made: ReshardPlan, counting: Counting) -> None:
    """The holders are the trainer ranks that hold all of a copy, every one of them."""
    for copy in made.copies:
        parameter = counting.engine[copy.target_rank][copy.parameter]
        index = tuple(slice(*interval) for interval in copy.target)
        assert copy.holders == counting.holders(parameter[index])


CASES = {
    "dense": ("Qwen3ForCausalLM", "tp=2,pp=2,dp=2", False),
    "dense, tied, chunks": ("Qwen3ForCausalLM", "tp=2,pp=2,vpp=2", True),
    "dense, shared heads, uneven": ("Qwen3ForCausalLM", "tp=4,pp=3,first_stage_layers=1", True),
    "experts": ("Qwen3MoeForCausalLM", "tp=2,dp=2,ep=4,etp=1", False),
    "experts, tied, chunks": ("Qwen3MoeForCausalLM", "tp=2,pp=2,dp=2,ep=2,vpp=2", True),
    "experts, replicas": ("Qwen3MoeForCausalLM", "tp=1,pp=4,dp=4,ep=2", False),
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_servers_own_layout(case, tp):
    """Fused, stacked and padded as servers keep them; more ranks than key-value heads."""
    kind, trainer, tied = CASES[case]
    layers = 5 if "uneven" in case else 4
    config = resolved(kind, tie_word_embeddings=tied, num_hidden_layers=layers)
    layout = ParallelLayout.parse(trainer)
    targets = reshard_targets.server(config, mappings.huggingface_shapes(config), tp)
    made, counting = plan(config, layout, targets), Counting(config, layout, targets)
    check(made, counting)
    check_holders(made, counting)
    check_inverse(made, counting)


def test_a_copy_moves_in_the_parameters_dtype():
    config = resolved("DeepseekV3ForCausalLM")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    parameters = [
        TargetParameter("bias", (4,), (Fill(name, ((0, 4),), ((0, 4),)),), "float32"),
        TargetParameter("half", (4,), (Fill(name, ((0, 4),), ((0, 4),)),)),
    ]
    made = plan(config, ParallelLayout(tp=2), [parameters], dtype="bfloat16")
    assert [made.bytes_of(copy) for copy in made.copies] == [16, 8]
    source, half = torch.arange(4, dtype=torch.float32) / 3, torch.zeros(4, dtype=torch.bfloat16)
    move(made.copies[1], source, half)
    assert torch.equal(half, source.bfloat16())


def test_copies_are_in_the_order_of_their_places():
    """Whatever the order of fills: senders and receivers digest the same sequence."""
    name = "model.norm.weight"
    fills = (Fill(name, ((0, 5),), ((7, 12),)), Fill(name, ((5, 12),), ((0, 7),)))
    parameters = [TargetParameter("norm", (12,), fills)]
    made = plan(resolved("Qwen3ForCausalLM"), ParallelLayout(), [parameters])
    assert [copy.target for copy in made.copies] == [((0, 7),), ((7, 12),)]


def test_received_bytes_are_put_as_they_are():
    """What travelled flat fills a box of any shape."""
    values, parameter = torch.arange(6), torch.zeros((2, 3, 4), dtype=torch.int64)
    put(parameter, ((1, 2), (0, 3), (1, 3)), values)
    assert parameter[1, :, 1:3].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert int((parameter != 0).sum()) == 5


def _refused(fills: list[Fill], shape: tuple[int, ...], **fields: Any) -> str:
    config = resolved("Qwen3ForCausalLM", **fields)
    with pytest.raises(ValueError) as caught:
        plan(config, ParallelLayout(), [[TargetParameter("mine", shape, tuple(fills))]])
    return str(caught.value)


def test_targets_that_do_not_fit_are_refused_all_at_once():
    name, box = "model.layers.0.self_attn.k_proj.weight", ((0, 40), (0, 12))
    said = _refused(
        [
            Fill("model.layers.0.self_attn.k_prj.weight", box, box),
            Fill(name, ((0, 41), (0, 12)), ((0, 41), (0, 12))),
            Fill(name, box, ((0, 12), (0, 40))),
            Fill(name, ((0, 1), (0, 12)), ((63, 65), (0, 12))),
        ],
        (64, 40),
    )
    assert f"did you mean '{name}'?" in said
    assert f"((0, 41), (0, 12)) is not within '{name}' of shape (40, 12)" in said
    assert "(40, 12) elements" in said and "do not fill a box of (12, 40)" in said
    assert "((63, 65), (0, 12)) is not within the parameter of shape (64, 40)" in said
    assert said.count("rank 0, 'mine'") >= 4


def test_overlapping_fills_are_refused():
    name = "model.norm.weight"
    fills = [Fill(name, ((0, 8),), ((0, 8),)), Fill(name, ((0, 8),), ((7, 15),))]
    assert "two fills overlap, at ((0, 8),) and ((7, 15),)" in _refused(fills, (16,))


def test_a_tied_head_is_filled_from_the_embeddings():
    box = ((0, 13), (0, 12))
    said = _refused([Fill("lm_head.weight", box, box)], (13, 12), tie_word_embeddings=True)
    assert "fill it from 'model.embed_tokens.weight'" in said


def test_a_layout_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="trainer layout tp=3"):
        plan(resolved("Qwen3ForCausalLM"), ParallelLayout(tp=3), [])


def test_an_engine_without_all_of_the_model_has_no_way_back():
    config = resolved("Qwen3ForCausalLM")
    shapes = mappings.huggingface_shapes(config)
    shapes.pop("model.layers.2.mlp.up_proj.weight")
    made = plan(config, ParallelLayout(tp=2), reshard_targets.plain(shapes, 2))
    with pytest.raises(ValueError, match=r"not keep all of model\.layers\.2\.mlp\.up_proj\.weight"):
        inverse(made)
