"""A pair channel carries buckets between two processes, over a real gloo group of two."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.weight_sync.pairs import (
    Endpoint,
    Listener,
    PairChannel,
    PairError,
    PairTimeout,
    connect,
)
from tests.weight_sync import pair_peers
from tests.weight_sync.pair_peers import LONG, Peer, payload


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Peer]]:
    """Starts peers and ends them."""
    peers: list[Peer] = []

    def begin(work: Any, *arguments: Any) -> Peer:
        peers.append(Peer(work, *arguments))
        return peers[-1]

    yield begin
    for peer in peers:
        peer.end()


def _pair(bucket: int = 1 << 20) -> tuple[PairChannel, PairChannel]:
    """Both ends of one channel in this process."""
    listener = Listener()
    ends: list[PairChannel] = []
    join = threading.Thread(
        target=lambda: ends.append(connect(listener.endpoint, "s", LONG, bucket=bucket))
    )
    join.start()
    accepted = listener.accept(["s"], LONG, bucket=bucket)["s"]
    join.join()
    listener.close()
    return accepted, ends[0]


def test_buckets_arrive_in_order_and_are_counted(listener, start):
    sizes = [1, 4096, 1 << 20, 3, 5 << 20, 2]
    peer = start(pair_peers.send_all, listener.endpoint, "trainer 0", sizes)
    channel = listener.accept(["trainer 0"], LONG, bucket=5 << 20)["trainer 0"]
    for number, size in enumerate(sizes):
        assert torch.equal(channel.receive(number, size), payload("trainer 0", number, size))
        channel.release(number)
    assert peer.result() == (sum(sizes), None)
    assert channel.bytes_received == sum(sizes)
    channel.close()
    assert not dist.is_initialized()


def test_two_trainers_and_two_engines(start):
    streams, sizes = ["trainer 0", "trainer 1"], [3 << 20, 1 << 20, 17]
    engines = [start(pair_peers.receive_all, streams, sizes) for _ in range(2)]
    ends = [engine.result() for engine in engines]
    senders = [start(pair_peers.send_all, end, stream, sizes) for end in ends for stream in streams]
    for engine in engines:
        right, received = engine.result()
        assert all(right) and len(right) == 6
        assert received == dict.fromkeys(streams, sum(sizes))
    assert [sender.result() for sender in senders] == [(sum(sizes), None)] * 4


@settings(max_examples=5)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=9))
def test_any_sizes(sizes: list[int]):
    receiver, sender = _pair()
    feed = threading.Thread(
        target=lambda: [sender.send(n, payload("s", n, size)) for n, size in enumerate(sizes)]
    )
    feed.start()
    for number, size in enumerate(sizes):
        assert torch.equal(receiver.receive(number, size), payload("s", number, size))
        receiver.release(number)
    feed.join()
    sender.finish()
    sender.close()
    receiver.close()


def test_a_receiver_holds_two_buckets_and_a_sender_waits():
    receiver, sender = _pair()
    buckets = [payload("s", number, 1 << 20) for number in range(4)]
    sender.send(0, buckets[0])
    first = receiver.receive(0, 1 << 20)
    sender.send(1, buckets[1])
    second = receiver.receive(1, 1 << 20)
    sender.send(2, buckets[2])
    sender.timeout = 1.0
    with pytest.raises(PairTimeout, match="bucket 2 was not taken within 1 s"):
        sender.send(3, buckets[3])
    assert torch.equal(first, buckets[0]) and torch.equal(second, buckets[1])
    receiver.close()


def test_a_later_version_comes_over_the_same_listener(listener, start):
    for version in range(3):
        peer = start(pair_peers.send_all, listener.endpoint, "s", [100 + version])
        channel = listener.accept(["s"], LONG)["s"]
        channel.receive(0, 100 + version)
        channel.release(0)
        assert peer.result() == (100 + version, None)
        channel.close()


def test_a_default_group_of_the_process_is_left_alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    try:
        before = dist.group.WORLD
        receiver, sender = _pair()
        sender.send(0, torch.ones(5, dtype=torch.uint8))
        assert receiver.receive(0, 5).tolist() == [1] * 5
        receiver.release(0)
        sender.finish()
        assert dist.group.WORLD is before
        number = torch.tensor([4])
        dist.all_reduce(number)
        assert number.item() == 4
        receiver.close()
        sender.close()
    finally:
        dist.destroy_process_group()


def _listening() -> set[str]:
    """Local addresses (hex) of every IPv4 socket of the machine that listens, with its port."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    return {line.split()[1] for line in lines if line.split()[3] == "0A"}


def test_it_listens_on_the_given_address_alone():
    before = _listening()
    receiver, sender = _pair()
    new = _listening() - before
    assert {address.split(":")[0] for address in new} <= {"0100007F"}
    receiver.close()
    sender.close()


def test_a_sender_needs_two_buffers_alone():
    receiver, sender = _pair(bucket=8 << 20)
    buffers = [torch.empty(8 << 20, dtype=torch.uint8) for _ in range(2)]

    def feed() -> None:
        for number in range(6):
            sender.send(number, buffers[number % 2].fill_(number))

    with ThreadPoolExecutor(1) as pool:
        fed = pool.submit(feed)
        for number in range(6):
            assert receiver.receive(number, 8 << 20).eq(number).all()
            receiver.release(number)
        fed.result()
    sender.finish()
    receiver.close()
    sender.close()


def test_wrong_size_and_wrong_number_are_refused_on_both_sides(listener, start):
    for due, text in (((0, 99), "bucket 0 of 99 bytes was due"), ((1, 100), "bucket 1 of 100")):
        peer = start(pair_peers.send_all, listener.endpoint, "s", [100])
        channel = listener.accept(["s"], LONG)["s"]
        with pytest.raises(PairError, match=text):
            channel.receive(*due)
        sent, error = peer.result()
        assert sent is None and text in error


def test_a_bucket_over_the_bound_is_refused_before_memory_is_taken(listener, start):
    start(pair_peers.send_all, listener.endpoint, "s", [2 << 20])
    channel = listener.accept(["s"], LONG, bucket=1 << 20)["s"]
    with pytest.raises(PairError, match="offered 2,097,152 bytes; at most 1,048,576 fit"):
        channel.receive(0, 2 << 20)


@pytest.mark.parametrize("phase", ["connected", "between", "inside"])
def test_a_sender_that_dies_is_named(listener, start, phase):
    start(pair_peers.send_and_die, listener.endpoint, "trainer 3", phase)
    channel = listener.accept(["trainer 3"], LONG)["trainer 3"]
    with pytest.raises(PairError, match=r"stream 'trainer 3' with 127.*: bucket [0-2] .*did not"):
        for number in range(2):
            channel.receive(number, 16 << 20)
            channel.release(number)
        channel.receive(2, 16 << 20)  # "inside" may have been in the kernel's memory whole
    with pytest.raises(PairError, match="is closed"):
        channel.receive(0, 1)


def test_a_sender_that_stalls_is_named_within_the_deadline(listener, start):
    start(pair_peers.send_and_die, listener.endpoint, "s", "stalled")
    channel = listener.accept(["s"], LONG)["s"]
    channel.timeout = 2.0
    with pytest.raises(PairTimeout, match=r"bucket \d .*did not come within 2 s"):
        for number in range(3):
            channel.receive(number, 16 << 20)
            channel.release(number)


# gloo was once seen to notice the end of a process whose buffers were full at its deadline only, so
# that case is a slow test: it fails then, by the text of the deadline, after two minutes.
UNRELEASED = pytest.param("unreleased", marks=pytest.mark.slow)


@pytest.mark.parametrize("phase", ["connected", UNRELEASED, "gives up"])
def test_a_receiver_that_dies_or_gives_up_is_named(start, phase):
    peer = start(pair_peers.receive_and_die, "s", phase)
    channel = connect(peer.result(), "s", LONG, bucket=1 << 30)
    words = "gave up: its slot is full" if phase == "gives up" else "closed|reset|[Bb]roken"
    with pytest.raises(PairError, match=f"stream 's' with 127.*bucket [0-2] was not .*({words})"):
        for number in range(3):
            channel.send(number, payload("s", number, 16 << 20))
        channel.finish()


def test_strangers_are_refused_and_the_peer_still_comes(listener, start):
    end = listener.endpoint
    with ThreadPoolExecutor(1) as pool:
        awaited = pool.submit(listener.accept, ["s"], LONG)
        socket.create_connection((end.host, end.port)).close()
        with socket.create_connection((end.host, end.port)) as noise:
            noise.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 4)
            with suppress(ConnectionResetError):
                while noise.recv(1 << 10):
                    pass
        stranger = Endpoint(end.host, end.port, "0" * 64)
        with pytest.raises(PairError, match="'s' at .* its nonce is another one"):
            connect(stranger, "s", LONG)
        start(pair_peers.send_all, end, "s", [1])
        channel = awaited.result()["s"]
    assert channel.receive(0, 1).numel() == 1
    assert listener.refused == 3
    channel.close()


def test_a_listener_of_another_nonce_is_refused(listener):
    claimed = Endpoint(listener.endpoint.host, listener.endpoint.port, "1" * 64)
    with ThreadPoolExecutor(1) as pool:
        awaited = pool.submit(listener.accept, ["s"], LONG)
        with pytest.raises(PairError, match="refused this connection"):
            connect(claimed, "s", LONG)
        connect(listener.endpoint, "s", LONG).close()
        awaited.result()["s"].close()


def test_an_unknown_stream_is_told_why(listener):
    with ThreadPoolExecutor(1) as pool:
        awaited = pool.submit(listener.accept, ["trainer 0"], LONG)
        with pytest.raises(PairError, match="'trainer 9' is not awaited"):
            connect(listener.endpoint, "trainer 9", LONG)
        channel = connect(listener.endpoint, "trainer 0", LONG)
        awaited.result()["trainer 0"].close()
        channel.close()


def test_nobody_comes_and_nobody_listens(listener):
    with pytest.raises(PairTimeout, match=r"no peer came for a, b at 127.0.0.1:\d+ within 1 s"):
        listener.accept(["a", "b"], 0.6)
    listener.close()
    with pytest.raises(PairTimeout, match="stream 'a' at .*nobody listens there, tried for 1 s"):
        connect(listener.endpoint, "a", 0.6)


@pytest.mark.parametrize("late", [1.0, pytest.param(10.0, marks=pytest.mark.slow)])
def test_a_late_peer_is_waited_for(listener, start, late):
    start(pair_peers.send_all, listener.endpoint, "s", [8], late)
    channel = listener.accept(["s"], LONG)["s"]
    assert channel.receive(0, 8).numel() == 8
    channel.release(0)
    channel.close()
