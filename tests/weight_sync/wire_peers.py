"""The two sides of a publication over a real network: trainer ranks and engines on two hosts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hybridflow.weight_sync.pairs import Listener, PairChannel, connect
from hybridflow.weight_sync.sender import Sender
from hybridflow.weight_sync.standby import StandbyReceiver
from hybridflow.weight_sync.streams import TRAILER, cut
from megatron_bridge import reshard
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard import Routes, Seat
from tests.two_hosts import enter_network
from tests.weight_sync.pair_peers import LONG
from tests.weight_sync.shards import planned, trainer_tensors

BUCKET = 256 << 10


@dataclass(frozen=True)
class Wire:
    """Trainer ranks of ``layout`` and ``engines`` servers of ``tp`` ranks, all on "engines" but
    for the trainer ranks ``elsewhere``."""

    model: str
    layout: ParallelLayout
    tp: int
    engines: int
    elsewhere: tuple[int, ...]

    @cached_property
    def crossing(self) -> int:
        """Buckets of one publication that cross hosts."""
        plan = self.routes.plan
        sends = [s for rank in self.elsewhere for s in self.routes.sends(rank).values()]
        return sum(len(cut(plan, copies, BUCKET)) for copies in sends)

    @cached_property
    def routes(self) -> Routes:
        """As every process of a run computes them."""
        plan = planned(Path(self.model), self.layout, self.tp)
        trainer = [
            Seat("trainer" if rank in self.elsewhere else "engines", None)
            for rank in range(self.layout.world)
        ]
        return reshard.route(plan, trainer, [[Seat("engines", None)] * self.tp] * self.engines)


@dataclass(frozen=True)
class Counted:
    """What trainer ranks say they sent: to whom each, and what left through the network.

    Attributes:
        streams: that crossed the network.
        payload: their bytes, trailers of buckets included.
    """

    proofs: dict[int, Any]
    streams: int
    payload: int


def send(pipe: Connection, namespace: str) -> None:
    """Be trainer ranks: send what is asked for, wiring after wiring, until the pipe ends."""
    enter_network(namespace)
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        _send_versions(pipe, *task)


def _send_versions(pipe: Connection, wire: Wire, ranks: Sequence[int]) -> None:
    held = trainer_tensors(Path(wire.model), wire.layout)
    channels: list[PairChannel] = []

    def join(endpoint: Any, stream: str) -> PairChannel:
        limit = endpoint.bucket + TRAILER
        channels.append(connect(endpoint.listener, stream, LONG, bucket=limit))
        return channels[-1]

    senders = {rank: Sender(wire.routes, rank, lambda r=rank: held[r], join) for rank in ranks}
    with ThreadPoolExecutor(len(senders)) as pool:
        while (endpoints := pipe.recv()) is not None:
            version = endpoints[0].version
            sending = {r: pool.submit(s.send, endpoints, version) for r, s in senders.items()}
            proofs = {rank: future.result() for rank, future in sending.items()}
            payload = sum(channel.bytes_sent for channel in channels)
            pipe.send(Counted(proofs, len(channels), payload))
            channels.clear()


def receive(pipe: Connection, namespace: str, address: str) -> None:
    """Be engines' workers: take and prove version after version, until the pipe ends."""
    enter_network(namespace)
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        _receive_versions(pipe, address, *task)


def _receive_versions(pipe: Connection, address: str, wire: Wire, folder: str) -> None:
    receivers = [
        StandbyReceiver(
            wire.routes, n, folder, bucket=BUCKET, seconds=LONG, listener=Listener(address)
        )
        for n in range(wire.engines)
    ]
    with ThreadPoolExecutor(len(receivers)) as pool:
        while (version := pipe.recv()) is not None:
            pipe.send({n: receiver.open(version) for n, receiver in enumerate(receivers)})
            receiving = [pool.submit(receiver.receive, version) for receiver in receivers]
            proofs = pipe.recv()
            for receiver, future in zip(receivers, receiving, strict=True):
                future.result()
                receiver.prove(version, proofs)
            pipe.send(sum(receiver.bytes for receiver in receivers))
    for receiver in receivers:
        receiver.close()
