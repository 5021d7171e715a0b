"""Trainer ranks in processes of their own, on another host as the plan sees it, fill slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hybridflow.weight_sync import server_checksum
from hybridflow.weight_sync.areas import StreamBroken
from hybridflow.weight_sync.checksum import engine_digest
from hybridflow.weight_sync.inbox import WeightMismatch
from hybridflow.weight_sync.pairs import Listener, PairError, PairTimeout
from hybridflow.weight_sync.slots import open_slot, slot_rank_digest
from hybridflow.weight_sync.standby import StandbyReceiver
from megatron_bridge.layout import ParallelLayout
from tests.tiny_models import make_model
from tests.weight_sync import pair_peers
from tests.weight_sync.pair_peers import LONG, Peer
from tests.weight_sync.shards import planned, read_config, routed

LAYOUT, TP = ParallelLayout(tp=2, pp=3), 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("remote") / "model")


@pytest.fixture
def start() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def begin(work: Any, *arguments: Any) -> Peer:
        peers.append(Peer(work, *arguments))
        return peers[-1]

    yield begin
    for peer in peers:
        peer.end()


def _receiver(model: Path, folder: Path, seconds: float = LONG) -> StandbyReceiver:
    routes = routed(planned(model, LAYOUT, TP), elsewhere=range(LAYOUT.world))
    return StandbyReceiver(routes, 0, folder, bucket=10_000, seconds=seconds, listener=Listener())


def _trainers(start, model: Path, endpoint: Any, *groups: tuple[int, ...], dies_at=None):
    return [
        start(pair_peers.send_shards, str(model), LAYOUT, TP, ranks, endpoint, dies_at)
        for ranks in groups
    ]


def test_slots_are_whole_and_proven(model: Path, tmp_path: Path, start):
    receiver = _receiver(model, tmp_path)
    endpoint = receiver.open(1)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receiver.receive, 1)
        trainers = _trainers(start, model, endpoint, *[(rank,) for rank in range(LAYOUT.world)])
        proofs: dict[int, Any] = {}
        for trainer in trainers:
            proofs |= trainer.result()
        receiving.result()
    told = [proofs[rank] for rank in range(LAYOUT.world)]
    receiver.prove(1, told)
    assert receiver.bytes == sum(sent.bytes for links in told for sent in links.values())
    slots = [
        open_slot(path, layout)
        for path, layout in zip(endpoint.slots, receiver._layouts, strict=True)
    ]
    weights = load_file(model / "model.safetensors")
    whole = server_checksum(weights, read_config(model), TP)
    assert engine_digest(map(slot_rank_digest, slots)) == whole
    broken = [*told[:-1], {link: replace(sent, digest="0" * 64) for link, sent in told[-1].items()}]
    with pytest.raises(WeightMismatch, match=f"trainer {LAYOUT.world - 1} to engine 0 rank"):
        receiver.prove(1, broken)
    receiver.close()


def test_a_trainer_killed_meanwhile_is_named(model: Path, tmp_path: Path, start):
    receiver = _receiver(model, tmp_path)
    endpoint = receiver.open(1)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receiver.receive, 1)
        _trainers(start, model, endpoint, *[(rank,) for rank in range(1, LAYOUT.world)])
        _trainers(start, model, endpoint, (0,), dies_at=9)
        with pytest.raises(PairError, match="trainer 0 to engine 0 rank [01]"):
            receiving.result()
    receiver.close()


def test_a_trainer_that_never_comes_is_named(model: Path, tmp_path: Path):
    receiver = _receiver(model, tmp_path, seconds=1.0)
    receiver.open(1)
    with pytest.raises(PairTimeout, match="no peer came for .*trainer 5 to engine 0 rank 1"):
        receiver.receive(1)
    receiver.close()


def test_a_bucket_of_another_publication_is_refused(model: Path, tmp_path: Path, start):
    receiver = _receiver(model, tmp_path)
    endpoint = replace(receiver.open(1), nonce="another")
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receiver.receive, 1)
        ranks = tuple((rank,) for rank in range(LAYOUT.world))
        _trainers(start, model, endpoint, *ranks)
        with pytest.raises(StreamBroken, match=r"bucket 0 of stream trainer \d .* sender hashed"):
            receiving.result()
    receiver.close()
