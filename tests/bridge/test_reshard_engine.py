"""Engines on the trainer's own devices: what is reused, what moves, and the paper's formulas."""

from fractions import Fraction

import pytest

from megatron_bridge import mappings, registry, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard import ReshardPlan, Routes, Seat, hybrid_engine, plan, route
from megatron_bridge.reshard.hybrid_engine import Engines, assignment, micro_groups, vanilla
from tests.bridge import reshard_targets
from tests.bridge.published_dense import PUBLISHED

QWEN3_8B = PUBLISHED["Qwen/Qwen3-0.6B"] | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
PAIRS = [
    *(("tp=8", 8), ("tp=8", 4), ("tp=8", 2), ("tp=8", 1)),
    *(("tp=4,pp=2", 4), ("tp=4,pp=2", 2), ("tp=2,pp=4,dp=2", 1), ("tp=8,pp=2,dp=2", 4)),
]


def _planned(layout: ParallelLayout, generation_tp: int) -> ReshardPlan:
    config = translation.resolve(QWEN3_8B)
    shapes = mappings.huggingface_shapes(config)
    return plan(config, layout, reshard_targets.plain(shapes, generation_tp))


def _routed(made: ReshardPlan, engines: Engines) -> Routes:
    seats = [Seat(f"host {rank // 8}", rank % 8) for rank in range(made.layout.world)]
    return route(made, seats, [[seats[rank] for rank in engine] for engine in engines])


def _uncut(made: ReshardPlan) -> int:
    """Bytes of norms, which every tensor parallel rank keeps whole."""
    names = {row.parts[0].name for row in registry.architecture(made.config).rows if not row.cut}
    return sum(
        2 * weight.shape()[0]
        for weight in made.weights
        if weight.shape_of.parts[0].name in names and len(weight.shape()) == 1
    )


def test_engines_of_the_papers_figure():
    layout = ParallelLayout(tp=4, dp=2)
    assert assignment(layout, 2) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert micro_groups(layout, 2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert vanilla(layout, 2) == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_the_trainers_own_tp_is_taken_as_it_is():
    layout = ParallelLayout(tp=4, pp=2, dp=2)
    groups = tuple(tuple(range(first, first + 4)) for first in range(0, 16, 4))
    assert assignment(layout, 4) == vanilla(layout, 4) == groups
    assert assignment(layout, 1) == vanilla(layout, 1) == tuple((rank,) for rank in range(16))


@pytest.mark.parametrize(("trainer", "generation_tp"), PAIRS)
def test_groups_cover_all_devices_and_have_the_papers_size(trainer, generation_tp):
    layout = ParallelLayout.parse(trainer)
    for groups in (assignment(layout, generation_tp), micro_groups(layout, generation_tp)):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    size = layout.tp * layout.pp // generation_tp
    assert {len(group) for group in micro_groups(layout, generation_tp)} == {size}
    place = {
        rank: place
        for engine in assignment(layout, generation_tp)
        for place, rank in enumerate(engine)
    }
    for group in micro_groups(layout, generation_tp):
        assert len({place[rank] for rank in group}) == 1  # all generate with one shard


@pytest.mark.parametrize(("trainer", "generation_tp"), PAIRS)
def test_training_shards_are_reused_and_the_papers_volume_moves(trainer, generation_tp):
    """What is cut moves exactly as in the paper.

    Its formula takes every tensor as cut. Norms are not: a device lacks those of other stages
    alone, and its own are there already.
    """
    layout = ParallelLayout.parse(trainer)
    made = _planned(layout, generation_tp)
    engines = assignment(layout, generation_tp)
    routes = _routed(made, engines)
    traffic = routes.traffic()
    for engine, received in zip(engines, traffic.received, strict=True):
        for rank, own in zip(engine, received, strict=True):
            assert own.device == made.held_bytes[rank]  # no training byte is kept for nothing
    norms, other_stages = _uncut(made), 1 - Fraction(1, layout.pp)
    paper = hybrid_engine.hybridflow(made.model_bytes - norms, layout, generation_tp)
    ours = hybrid_engine.planned(routes)
    assert ours.volume == paper.volume + norms * other_stages
    assert ours.peak == paper.peak + norms
    assert ours.redundancy == paper.redundancy == 0
    whole = hybrid_engine.hybridflow(made.model_bytes, layout, generation_tp)
    assert abs(ours.volume - whole.volume) < made.model_bytes / 10**4
    if layout.pp == 1:
        assert ours.volume <= whole.volume
    if generation_tp == layout.tp and layout.pp == 1:
        assert traffic.moved == 0


@pytest.mark.parametrize(("trainer", "generation_tp"), PAIRS)
def test_consecutive_ranks_reuse_less(trainer, generation_tp):
    layout = ParallelLayout.parse(trainer)
    made = _planned(layout, generation_tp)
    ours, theirs = (
        _routed(made, engines(layout, generation_tp)).traffic() for engines in (assignment, vanilla)
    )
    if generation_tp in (1, layout.tp):
        assert ours == theirs
    else:
        assert ours.moved < theirs.moved
        assert theirs.total.device < sum(made.held_bytes) == ours.total.device


def test_the_papers_table():
    layout = ParallelLayout(tp=8, pp=2, dp=4)
    model = 64 * 1000
    assert hybrid_engine.deepspeed_chat(model, layout) == (63000, 64000, 1000)
    assert hybrid_engine.hybridflow_vanilla(model, layout) == (60000, 64000, 4000)
    assert hybrid_engine.hybridflow(model, layout, 4) == (12000, 16000, 0)
    assert hybrid_engine.hybridflow(model, layout, 2, 2) == (12000, 16000, 0)
    assert hybrid_engine.openrlhf(model, 4) == (64000, 16000, 16000)


def test_a_generation_tp_that_reuses_nothing_is_refused():
    for groups in (assignment, micro_groups, vanilla):
        with pytest.raises(ValueError, match=r"does not divide the trainer's tp=4.*\[1, 2, 4\]"):
            groups(ParallelLayout(tp=4), 3)
