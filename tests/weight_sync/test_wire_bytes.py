"""What a publication puts on the wire between two hosts, by the kernel's own counters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.weight_sync.streams import TRAILER
from megatron_bridge.layout import ParallelLayout
from tests.tiny_models import make_model
from tests.two_hosts import TwoHosts, refusal
from tests.weight_sync import wire_peers
from tests.weight_sync.pair_peers import Peer
from tests.weight_sync.wire_peers import Wire

pytestmark = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))

VERSIONS = 2
OF_A_STREAM = 8 << 10
"""Bytes of one stream beside its buckets: handshake, rendezvous, receipts."""
CASES = {
    "tp2 to tp1": ("dense", ParallelLayout(tp=2), 1, 1, ()),
    "tp2 to tp1, one rank here": ("dense", ParallelLayout(tp=2), 1, 1, (0,)),
    "tp2 pp2 to tp2": ("dense", ParallelLayout(tp=2, pp=2), 2, 1, ()),
    "pp2 dp2 to two of tp1": ("dense", ParallelLayout(pp=2, dp=2), 1, 2, ()),
    "dp2 to tp2, one replica here": ("dense", ParallelLayout(dp=2), 2, 1, (1,)),
    "tp1 to tp2": ("dense", ParallelLayout(), 2, 1, ()),
    "ep2 to tp2": ("experts", ParallelLayout(dp=2, ep=2), 2, 1, ()),
    "ep2 to tp1, one rank here": ("experts", ParallelLayout(dp=2, ep=2), 1, 1, (1,)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wire")
    return {
        "dense": make_model(folder / "dense", hidden_size=192, num_hidden_layers=4),
        "experts": make_model(folder / "experts", "qwen3_moe"),
    }


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as two:
        yield two


@pytest.fixture(scope="module")
def peers(hosts: TwoHosts) -> Iterator[list[Peer]]:
    """Engines' workers on the second host; trainer ranks on the first, and on the second."""
    first, second = hosts.first, hosts.second
    begun = [Peer(wire_peers.receive, second.namespace, second.address)]
    begun += [Peer(wire_peers.send, host.namespace) for host in (first, second)]
    yield begun
    for peer in begun:
        peer.end()


@pytest.mark.parametrize("case", CASES)
def test_the_lower_bound_crosses_and_no_more(
    case: str, models: dict[str, Path], hosts: TwoHosts, peers: list[Peer], tmp_path: Path
) -> None:
    family, layout, tp, engines, here = CASES[case]
    elsewhere = tuple(rank for rank in range(layout.world) if rank not in here)
    wire = Wire(str(models[family]), layout, tp, engines, elsewhere)
    taking, *sending = peers if here else peers[:2]
    for peer, task in zip((taking, *sending), (str(tmp_path), elsewhere, here), strict=False):
        peer.tell((wire, task))
    bound = _bound(wire)
    assert wire.routes.traffic().total.network == bound

    for version in range(1, VERSIONS + 1):
        before = hosts.first.sent()
        kept, told = _publish(taking, sending, version)
        on_wire = hosts.first.sent() - before
        assert kept == wire.routes.traffic().needed
        assert told.payload == bound + wire.crossing * TRAILER
        assert told.payload <= on_wire <= 1.03 * told.payload + (told.streams + 1) * OF_A_STREAM
    for peer in (taking, *sending):
        peer.tell(None)


def _publish(taking: Peer, sending: list[Peer], version: int) -> tuple[int, wire_peers.Counted]:
    """Bytes that the engines keep, and what the first host's trainer ranks counted."""
    taking.tell(version)
    endpoints = taking.result()
    for peer in sending:
        peer.tell(endpoints)
    counted = [peer.result() for peer in sending]
    proofs = {rank: links for told in counted for rank, links in told.proofs.items()}
    taking.tell([proofs[rank] for rank in sorted(proofs)])
    return taking.result(), counted[0]


def _bound(wire: Wire) -> int:
    """Bytes that the engines keep and that no trainer rank on their host holds, copy by copy."""
    plan = wire.routes.plan
    missing = (copy for copy in plan.copies if set(copy.holders) <= set(wire.elsewhere))
    return wire.engines * sum(plan.bytes_of(copy) for copy in missing)
