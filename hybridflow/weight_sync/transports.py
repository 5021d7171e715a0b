"""The two sides of each transport, by the recipe's word for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hybridflow.weight_sync import pairs
from hybridflow.weight_sync.broadcast import BroadcastInbox, BroadcastOutbox
from hybridflow.weight_sync.bucketed import BucketedReceiver
from hybridflow.weight_sync.direct import connect_to
from hybridflow.weight_sync.disk import DiskInbox, DiskOutbox, Export
from hybridflow.weight_sync.finite import watch_finite
from hybridflow.weight_sync.inbox import Inbox
from hybridflow.weight_sync.sender import Sender
from hybridflow.weight_sync.standby import StandbyReceiver
from hybridflow.weight_sync.wiring import Wiring

_LOOPBACK = "127.0.0.1"
_RECEIVERS = {"standby": StandbyReceiver, "bucketed": BucketedReceiver}


class Trainer(Protocol):
    """What a transport asks of a trainer rank's engine."""

    def export_weights(self) -> Iterator[tuple[str, Tensor]]: ...
    def local_weights(self) -> Mapping[int, Tensor]: ...


class Outbox(Protocol):
    """A trainer rank's side."""

    def send(self, endpoints: Mapping[int, Any], version: int, /) -> Any:
        """Send this rank's part to every engine; what it says it sent. Collective."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def make_outbox(wiring: Wiring, rank: int, trainer: Trainer, local: Path) -> Outbox:
    """Trainer rank ``rank``'s side; ``local`` is a folder of its own on its host."""
    return _OUTBOXES[wiring.sync.transport](wiring, rank, trainer, local)


def make_inbox(wiring: Wiring, engine: int, local: Path, address: str) -> Inbox:
    """Engine ``engine``'s side.

    Args:
        local: the folder that its server was started with.
        address: of this host, at which trainer ranks on other hosts reach it.
    """
    return _INBOXES[wiring.sync.transport](wiring, engine, local, address)


def _direct_outbox(wiring: Wiring, rank: int, trainer: Trainer, local: Path) -> Outbox:
    return Sender(wiring.routes, rank, trainer.local_weights, connect_to)


def _direct_inbox(wiring: Wiring, engine: int, local: Path, address: str) -> Inbox:
    host = wiring.engines[engine][0].host
    elsewhere = {wiring.trainer[rank].host for rank in wiring.sources(engine)} - {host}
    return _RECEIVERS[wiring.sync.mode](
        wiring.routes,
        engine,
        local,
        bucket=wiring.sync.bucket,
        seconds=wiring.sync.seconds,
        device=wiring.device,
        listener=pairs.Listener(address) if elsewhere else None,
        keep_cache=wiring.sync.pause == "in_place",
    )


def _broadcast_inbox(wiring: Wiring, engine: int, local: Path, address: str) -> Inbox:
    if wiring.device == "cuda" and wiring.trainer[0] in wiring.engines[engine]:
        raise ValueError(
            "roles.rollout.sync.transport: broadcast needs a GPU of its own for trainer rank 0 and "
            f"for each server rank (NCCL takes each once), and they share {wiring.trainer[0]}; "
            "choose the transport direct, or take roles.rollout.colocate away"
        )
    hosts = {seat.host for seat in (*wiring.trainer, *wiring.engines[engine])}
    listener = pairs.Listener(address if len(hosts) > 1 else _LOOPBACK)
    return BroadcastInbox(wiring, engine, local, listener)


class _Whole:
    """An outbox of whole tensors, none of which may hold NaN or infinity."""

    def __init__(self, trainer: Trainer, make: Callable[[Export], Outbox]) -> None:
        self._trainer, self._version = trainer, 0
        self._outbox = make(self._export)

    def send(self, endpoints: Mapping[int, Any], version: int) -> Any:
        """See ``Outbox.send``. NonFiniteWeights: names the tensor."""
        self._version = version
        return self._outbox.send(endpoints, version)

    def close(self) -> None:
        """Give everything back."""
        self._outbox.close()

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        return watch_finite(self._trainer.export_weights(), self._version)


_OUTBOXES: dict[str, Callable[[Wiring, int, Trainer, Path], Outbox]] = {
    "direct": _direct_outbox,
    "disk": lambda wiring, rank, trainer, local: _Whole(
        trainer, lambda export: DiskOutbox(wiring, rank, export, local)
    ),
    "broadcast": lambda wiring, rank, trainer, local: _Whole(
        trainer, lambda export: BroadcastOutbox(wiring, rank, export)
    ),
}
_INBOXES: dict[str, Callable[[Wiring, int, Path, str], Inbox]] = {
    "direct": _direct_inbox,
    "disk": lambda wiring, engine, local, address: DiskInbox(wiring, engine, local),
    "broadcast": _broadcast_inbox,
}
