"""What the other process of a pair channel's test does. Forked from a clean process: no threads."""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from hybridflow.weight_sync.pairs import Endpoint, Listener, PairChannel, PairError, connect
from hybridflow.weight_sync.sender import Sender
from tests.weight_sync.shards import planned, routed, trainer_tensors

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])
LONG = 120.0
"""A deadline that no test waits for."""


def payload(stream: str, number: int, nbytes: int) -> torch.Tensor:
    """The bytes that bucket `number` of `stream` holds."""
    generator = torch.Generator().manual_seed(sum(stream.encode()) * 1000 + number)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


class Peer:
    """A process that runs one function of this module; `result` is what it sent back."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        self._ours, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def result(self) -> Any:
        """The next thing that the process sends."""
        assert self._ours.poll(LONG), "the peer said nothing"
        return self._ours.recv()

    def tell(self, message: Any) -> None:
        """Send something to the process."""
        self._ours.send(message)

    def end(self) -> None:
        """End the process, however it stands."""
        self.process.kill()
        self.process.join()


def send_all(
    pipe: Connection,
    endpoint: Endpoint,
    stream: str,
    sizes: list[int],
    late: float = 0.0,
) -> None:
    """After `late` seconds connect and send buckets of `sizes`; reports (bytes sent, error)."""
    torch.set_num_threads(1)
    time.sleep(late)
    try:
        channel = connect(endpoint, stream, LONG, bucket=1 << 30)
        for number, size in enumerate(sizes):
            channel.send(number, payload(stream, number, size))
        channel.finish()
        pipe.send((channel.bytes_sent, None))
        channel.close()
    except PairError as error:
        pipe.send((None, f"{type(error).__name__}: {error}"))


def send_and_die(pipe: Connection, endpoint: Endpoint, stream: str, phase: str) -> None:
    """Die (SIGKILL) or stall (SIGSTOP) at a phase of sending two buckets of 16 MiB."""
    torch.set_num_threads(1)
    channel = connect(endpoint, stream, LONG, bucket=1 << 30)
    if phase == "connected":
        os.kill(os.getpid(), signal.SIGKILL)
    channel.send(0, payload(stream, 0, 16 << 20))
    channel.flush()
    if phase == "between":
        os.kill(os.getpid(), signal.SIGKILL)
    channel.send(1, payload(stream, 1, 16 << 20))
    os.kill(os.getpid(), signal.SIGSTOP if phase == "stalled" else signal.SIGKILL)


def receive_all(pipe: Connection, streams: list[str], sizes: list[int]) -> None:
    """Listen, tell the endpoint, receive each stream's buckets; reports which were right."""
    torch.set_num_threads(1)
    listener = Listener()
    pipe.send(listener.endpoint)
    channels = listener.accept(streams, LONG)
    right = []
    for stream in streams:
        channel = channels[stream]
        for number, size in enumerate(sizes):
            bucket = channel.receive(number, size)
            right.append(torch.equal(bucket, payload(stream, number, size)))
            channel.release(number)
    pipe.send((right, {stream: channels[stream].bytes_received for stream in streams}))
    pipe.recv()


def receive_and_die(pipe: Connection, stream: str, phase: str) -> None:
    """Listen, then die (SIGKILL) at a phase of receiving."""
    torch.set_num_threads(1)
    listener = Listener()
    pipe.send(listener.endpoint)
    channel = listener.accept([stream], LONG)[stream]
    if phase == "connected":
        os.kill(os.getpid(), signal.SIGKILL)
    channel.receive(0, 16 << 20)
    if phase == "unreleased":
        os.kill(os.getpid(), signal.SIGKILL)
    channel.fail("its slot is full")
    pipe.recv()


def serve_rank(pipe: Connection, invitation: dict, rank: int, nbytes: int) -> None:
    """One rank of a server, joined as SGLang joins: `torch.distributed`'s own helper."""
    torch.set_num_threads(1)
    address = f"tcp://{invitation['master_address']}:{invitation['master_port']}"
    world, name = invitation["world_size"], invitation["group_name"]
    wait = datetime.timedelta(seconds=LONG)
    store, rank, world = next(c10d.rendezvous(address, rank, world, timeout=wait))
    store.set_timeout(wait)
    group, _ = c10d._new_process_group_helper(
        world,
        rank,
        [],
        c10d.Backend(invitation["backend"]),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=wait,
    )
    c10d._world.pg_group_ranks[group] = {place: place for place in range(world)}
    got = torch.zeros(nbytes, dtype=torch.uint8)
    c10d.broadcast(got, src=0, group=group)
    pipe.send(got.tolist())


def send_shards(
    pipe: Connection,
    folder: str,
    layout: Any,
    tp: int,
    ranks: tuple[int, ...],
    endpoint: Any,
    dies_at: int | None,
) -> None:
    """Be the trainer ranks `ranks` on another host; report what each sent to the engine.

    At its `dies_at`th read of a copy the process is killed.
    """
    torch.set_num_threads(1)
    plan = planned(Path(folder), layout, tp)
    routes = routed(plan, elsewhere=range(layout.world))
    tensors = trainer_tensors(Path(folder), layout)
    reads = itertools.count()

    def join(endpoint: Any, stream: str) -> PairChannel:
        return connect(endpoint.listener, stream, endpoint.seconds)

    class Dying(dict[int, torch.Tensor]):
        def __getitem__(self, weight: int) -> torch.Tensor:
            if next(reads) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(weight)

    proofs = {}
    for rank in ranks:
        sender = Sender(routes, rank, lambda rank=rank: Dying(tensors[rank]), join)
        proofs[rank] = sender.send({0: endpoint}, endpoint.version)
        sender.close()
    pipe.send(proofs)
