"""What a broadcast is made of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.rollout.launch import ServerConfig, start_server
from hybridflow.weight_sync.broadcast import BroadcastInbox, BroadcastOutbox
from hybridflow.weight_sync.full_buckets import buckets
from hybridflow.weight_sync.layout import hf_shapes
from hybridflow.weight_sync.pairs import Listener, PairTimeout
from hybridflow.weight_sync.pairs.broadcast_group import BroadcastGroup
from hybridflow.weight_sync.transports import make_inbox
from megatron_bridge.reshard import Seat
from tests.rollout.broadcast_cases import config, weights, wiring
from tests.tiny_models import make_model
from tests.weight_sync.pair_peers import LONG, Peer, serve_rank


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("broadcast") / "model")


@settings(max_examples=25)
@given(limit=st.integers(1, 90_000), narrow=st.lists(st.booleans(), min_size=40, max_size=40))
def test_buckets_hold_every_tensor_once(model: Path, limit: int, narrow: list[bool]):
    known = config(model)
    given_ = {
        name: tensor.bfloat16() if narrow[place % 40] else tensor
        for place, (name, tensor) in enumerate(weights(model))
    }
    got, storages = {}, set()
    for bucket in buckets(given_.items(), known, limit):
        assert bucket.payload.numel() <= limit or len(bucket.names) == 1
        storages.add(bucket.payload.untyped_storage().data_ptr())
        at = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            kind = getattr(torch, dtype)
            assert at % kind.itemsize == 0
            size = torch.Size(shape).numel() * kind.itemsize
            assert name not in got
            got[name] = bucket.payload[at : at + size].view(kind).view(shape).clone()
            at += size
        assert at == bucket.payload.numel()
    assert got.keys() == given_.keys()
    assert all(torch.equal(got[name], given_[name]) for name in given_)


def test_two_buffers_take_turns(model: Path):
    shapes = hf_shapes(config(model))
    assert len(shapes) > 4
    made = [bucket.payload for bucket in buckets(weights(model), config(model), 1 << 17)]
    assert len({payload.untyped_storage().data_ptr() for payload in made}) == 2


def test_a_tied_head_is_left_out(model: Path):
    more = [*weights(model), ("something.else", torch.ones(3))]
    names = [name for bucket in buckets(more, config(model), 1 << 20) for name in bucket.names]
    assert "something.else" not in names


@pytest.mark.parametrize("tp", [1, 2])
def test_rank_0_meets_the_ranks_that_torch_makes(tp: int):
    group = BroadcastGroup("gloo", "127.0.0.1", 1 + tp, "weights", LONG)
    ranks = [Peer(serve_rank, group.invitation, 1 + rank, 5) for rank in range(tp)]
    try:
        group.join()
        group.broadcast(torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8))
        group.flush()
        assert [rank.result() for rank in ranks] == [[1, 2, 3, 4, 5]] * tp
    finally:
        for rank in ranks:
            rank.end()


def test_ranks_that_do_not_come_are_an_error_within_the_deadline():
    group = BroadcastGroup("gloo", "127.0.0.1", 2, "weights", 1.0)
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(PairTimeout, match="the server did not join the group weights"),
    ):
        pool.submit(group.join).result(LONG)


def test_a_rank_that_dies_is_an_error():
    group = BroadcastGroup("gloo", "127.0.0.1", 2, "weights", LONG)
    rank = Peer(serve_rank, group.invitation, 1, 5)
    try:
        group.join()
        group.broadcast(torch.ones(5, dtype=torch.uint8))
        group.flush()
        rank.result()
        rank.end()
        with pytest.raises(RuntimeError):
            for _ in range(3):
                group.broadcast(torch.ones(64 << 20, dtype=torch.uint8))
                group.flush()
    finally:
        rank.end()


def test_a_server_that_does_not_join_ends_the_broadcast_in_its_words(model: Path, tmp_path: Path):
    """The local engine has no such call; nobody waits for the deadline of joining."""
    server = start_server(ServerConfig("local", model, start_timeout=LONG))
    client = server.client()
    wired = wiring(model, 1, seconds=10 * LONG)
    inbox, outbox = (
        BroadcastInbox(wired, 0, tmp_path, Listener()),
        BroadcastOutbox(wired, 0, lambda: weights(model)),
    )
    try:
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(inbox.load, client, 1)
            sent = outbox.send({0: inbox.open(1)}, 1)
            with pytest.raises(RuntimeError, match="init_weights_update_group"):
                loading.result()
        assert sent is not None
        assert "init_weights_update_group" in sent.faults[0], sent
    finally:
        inbox.close()
        client.close()
        server.stop()


def test_no_broadcast_between_ranks_of_one_gpu(model: Path, tmp_path: Path):
    apart = replace(
        wiring(model, 2),
        device="cuda",
        trainer=(Seat("here", 0),),
        engines=((Seat("here", 1), Seat("here", 2)), (Seat("here", 3), Seat("here", 0))),
    )
    make_inbox(apart, 0, tmp_path, "127.0.0.1").close()
    with pytest.raises(ValueError, match=r"transport: broadcast needs a GPU.*transport direct"):
        make_inbox(apart, 1, tmp_path, "127.0.0.1")
