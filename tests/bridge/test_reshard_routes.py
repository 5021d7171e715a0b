"""Who sends what: nearest first, evenly, never more than engines lack; and at full size."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge import mappings, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard import LINKS, Routes, Seat, plan, route
from tests.bridge import reshard_targets
from tests.bridge.published_dense import PUBLISHED as DENSE
from tests.bridge.published_moe import PUBLISHED
from tests.bridge.reshard_counting import Counting
from tests.bridge.test_reshard import resolved, trainers


def _nearest(receiver: Seat, sender: Seat) -> int:
    """0: one device, 1: one host, 2: neither."""
    if receiver == sender and receiver.device is not None:
        return 0
    return 1 if receiver.host == sender.host else 2


def check(routes: Routes) -> None:
    """Every copy comes to every engine once, from a nearest holder; sums of bytes are right."""
    made, traffic = routes.plan, routes.traffic()
    sent = [[0, 0, 0] for _ in routes.trainer]
    sends = {rank: dict(routes.sends(rank)) for rank in range(len(routes.trainer))}
    for engine, seats in enumerate(routes.engines):
        for rank, seat in enumerate(seats):
            received, came = [0, 0, 0], []
            for source, copies in routes.receives(engine, rank).items():
                assert list(copies) == sorted(copies)
                assert sends[source].pop((engine, rank)) == copies
                came += copies
                for number in copies:
                    copy = made.copies[number]
                    kind = _nearest(seat, routes.trainer[source])
                    assert source in copy.holders
                    assert kind == min(_nearest(seat, routes.trainer[h]) for h in copy.holders)
                    assert routes.source(number, engine) == source
                    assert routes.link(number, engine) == LINKS[kind]
                    received[kind] += made.bytes_of(copy)
                    sent[source][kind] += made.bytes_of(copy)
            assert traffic.received[engine][rank] == tuple(received)
            assert sorted(came) == [n for n, c in enumerate(made.copies) if c.target_rank == rank]
    assert not any(sends.values())  # nothing is sent that nobody receives
    assert [tuple(one) for one in sent] == list(traffic.sent)


@st.composite
def seats(draw: Any, count: int) -> list[Seat]:
    device = st.one_of(st.none(), st.integers(0, 2))
    made = st.builds(Seat, st.sampled_from(("a", "b", "c")), device)
    return draw(st.lists(made, min_size=count, max_size=count))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_only_what_a_device_lacks_moves(data):
    kind = data.draw(st.sampled_from(("Qwen3MoeForCausalLM", "Qwen3ForCausalLM")))
    config = resolved(kind, tie_word_embeddings=data.draw(st.booleans()), num_hidden_layers=2)
    layout = data.draw(trainers(config))
    shapes = mappings.huggingface_shapes(config)
    tp = data.draw(st.sampled_from((2, 4, 1)))
    ep = data.draw(st.sampled_from([n for n in (2, 4, 1) if tp % n == 0]))
    targets = reshard_targets.plain(shapes, tp, ep)
    made = plan(config, layout, targets, dtype="float16")
    trainer = data.draw(seats(layout.world))
    engines = [data.draw(seats(tp)) for _ in range(data.draw(st.integers(1, 3)))]
    routes = route(made, trainer, engines)
    check(routes)

    counting = Counting(config, layout, targets)
    beside = [
        [
            [n for n, seat in enumerate(trainer) if seat == mine and mine.device is not None]
            for mine in e
        ]
        for e in engines
    ]
    lacking = sum(counting.missing(rank, near) for e in beside for rank, near in enumerate(e))
    traffic = routes.traffic()
    assert traffic.moved == traffic.lower_bound == 2 * lacking
    kept = sum(int((t > 0).sum()) for rank in counting.engine for t in rank)
    assert traffic.needed == 2 * kept * len(engines) == sum(traffic.total)
    held = [sum(int((t > 0).sum()) for t in rank.values()) for rank in counting.trainer]
    assert list(made.held_bytes) == [2 * count for count in held]
    whole = counting.source.count
    assert traffic.model == 2 * whole
    assert traffic.gathered == 2 * (whole * tp * len(engines) + whole - held[0])
    again = route(plan(config, layout, targets, dtype="float16"), trainer, engines)
    assert [again.sends(rank) for rank in range(layout.world)] == [
        routes.sends(rank) for rank in range(layout.world)
    ]


@pytest.mark.parametrize("engines", [1, 3])
def test_replicas_share_the_work(engines):
    """No sender has more than its share by more than the largest tensor."""
    config = translation.resolve(DENSE["Qwen/Qwen3-0.6B"])
    layout = ParallelLayout(tp=2, pp=2, dp=4)
    targets = reshard_targets.plain(mappings.huggingface_shapes(config), 1)
    made = plan(config, layout, targets)
    trainer = [Seat("trainer", rank) for rank in range(16)]
    routes = route(made, trainer, [[Seat(f"rollout {n}", 0)] for n in range(engines)])
    sent = [one.network for one in routes.traffic().sent]
    largest = max(map(made.bytes_of, made.copies))
    for stage in (sent[:8], sent[8:]):
        for place in (stage[::2], stage[1::2]):
            assert max(place) - min(place) <= largest


def test_seats_are_one_per_rank():
    config = resolved("Qwen3ForCausalLM")
    made = plan(
        config, ParallelLayout(dp=2), reshard_targets.plain(mappings.huggingface_shapes(config), 2)
    )
    here = Seat("a", 0)
    with pytest.raises(
        ValueError, match="1 seats for the 2 ranks of the trainer layout tp=1,pp=1,dp=2"
    ):
        route(made, [here], [[here, here]])
    with pytest.raises(ValueError, match="has 2 ranks, engine 1 has 1, engine 2 has 3 seats"):
        route(made, [here, here], [[here] * 2, [here], [here] * 3])


def test_a_model_of_671b_from_1024_to_512_ranks():
    """Planned from config files alone; totals by hand."""
    config = translation.resolve(PUBLISHED["deepseek-ai/DeepSeek-V3"])
    layout = ParallelLayout.parse(
        "tp=8,pp=16,dp=8,ep=64,etp=1,first_stage_layers=3,last_stage_layers=2"
    )
    shapes = mappings.huggingface_shapes(config)
    made = plan(config, layout, reshard_targets.plain(shapes, 32, 32))
    needed = 16 * (2 * sum(map(math.prod, shapes.values())) + 31 * _replicated(shapes))
    trainer = [Seat(f"trainer {rank // 8}", rank % 8) for rank in range(1024)]

    far = [Seat(f"rollout {rank // 8}", rank % 8) for rank in range(512)]
    traffic = route(made, trainer, _engines(far)).traffic()
    assert traffic.needed == traffic.lower_bound == traffic.total.network == needed
    # Of the stages between the first and the last all ranks send about the same.
    middle = [one.network for one in traffic.sent[64:-64]]
    assert max(middle) < 1.1 * min(middle)

    traffic = route(made, trainer, _engines(trainer[:512])).traffic()
    assert traffic.moved == traffic.lower_bound == needed - traffic.total.device
    assert traffic.total.device > 0 < traffic.total.host


def _engines(seats: list[Seat]) -> list[list[Seat]]:
    return [seats[first : first + 32] for first in range(0, len(seats), 32)]


def _replicated(shapes: dict[str, tuple[int, ...]]) -> int:
    """Bytes that each rank of the plain layout keeps whole: norms, routers, latents."""
    whole = (
        "norm.weight",
        "layernorm.weight",
        "mlp.gate.weight",
        "a_proj.weight",
        "with_mqa.weight",
    )
    count = 0
    for name, (first, *rest) in shapes.items():
        if name.endswith(whole):
            count += 2 * first * (rest[0] if rest else 1)
        elif name.endswith("e_score_correction_bias"):
            count += 2 * first
    return count
