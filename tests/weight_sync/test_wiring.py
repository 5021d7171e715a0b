"""Who sends to whom, by where the ranks of a run turned out to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.weight_sync.wiring import SyncSettings, Wiring
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard import Seat
from tests.tiny_models import make_model

SYNC = SyncSettings("direct", "standby", 1 << 20, "retract", None, 60.0, "/dev/shm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("wiring") / "model", num_hidden_layers=4)


def wiring(model: Path, layout: ParallelLayout, trainer: str, engines: list[str]) -> Wiring:
    """Ranks by the letter of their node, as workers on CPUs tell their seats."""
    return Wiring(
        model_path=str(model),
        layout=layout,
        dtype="float32",
        tp=len(engines[0]),
        ep=1,
        device="cpu",
        trainer=tuple(Seat(node, None) for node in trainer),
        engines=tuple(tuple(Seat(node, None) for node in engine) for engine in engines),
        sync=SYNC,
    )


@pytest.mark.parametrize(
    ("layout", "trainer"),
    [
        (ParallelLayout(dp=2), "ab"),
        (ParallelLayout(tp=2, dp=2), "aabb"),
        (ParallelLayout(tp=2, pp=2, dp=2), "aabbaabb"),
        (ParallelLayout(tp=2, dp=3), "abbaab"),
    ],
)
def test_with_a_whole_replica_on_each_node_nothing_crosses(
    model: Path, layout: ParallelLayout, trainer: str
) -> None:
    made = wiring(model, layout, trainer, ["b", "a"])
    for engine, node in enumerate("ba"):
        assert {trainer[rank] for rank in made.sources(engine)} == {node}
    traffic = made.routes.traffic()
    assert traffic.total.network == 0 and traffic.total.host == traffic.needed


@pytest.mark.parametrize(
    ("layout", "trainer"),
    [
        (ParallelLayout(tp=2), "ab"),
        (ParallelLayout(pp=2), "ab"),
        (ParallelLayout(tp=2, pp=2), "abab"),
        (ParallelLayout(tp=2, dp=2), "abaa"),
    ],
)
def test_each_rollout_takes_from_its_own_node_first(
    model: Path, layout: ParallelLayout, trainer: str
) -> None:
    made = wiring(model, layout, trainer, ["a", "b"])
    routes, crossing = made.routes, 0
    for engine, node in enumerate("ab"):
        for number, copy in enumerate(made.plan.copies):
            near = {rank for rank in copy.holders if trainer[rank] == node}
            assert routes.source(number, engine) in (near or copy.holders)
            crossing += 0 if near else made.plan.bytes_of(copy)
    traffic = routes.traffic()
    assert 0 < traffic.total.network == crossing < traffic.needed
