"""Direct transport in a run: each engine rank gets the bytes it lacks, in its own layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from hybridflow.weight_sync.bucketed import BucketedReceiver
from hybridflow.weight_sync.endpoint import Endpoint
from hybridflow.weight_sync.pairs import Listener, PairChannel, connect
from hybridflow.weight_sync.receiver import Receiver
from hybridflow.weight_sync.sender import Sender
from hybridflow.weight_sync.standby import StandbyReceiver
from hybridflow.weight_sync.streams import TRAILER
from hybridflow.weight_sync.wiring import Wiring

_RECEIVERS = {"standby": StandbyReceiver, "bucketed": BucketedReceiver}


def outbox(wiring: Wiring, rank: int, tensors: Callable[[], Mapping[int, Tensor]]) -> Sender:
    """Trainer rank ``rank``'s side; ``tensors`` gives its own by the number of their weight."""
    return Sender(wiring.routes, rank, tensors, connect_to)


def inbox(wiring: Wiring, engine: int, local: Path, listener: Listener | None = None) -> Receiver:
    """Engine ``engine``'s side.

    Args:
        local: the folder that its server was started with.
        listener: where trainer ranks of other hosts come to; the inbox closes it.

    Raises:
        ValueError: there are such ranks and no listener.
    """
    return _RECEIVERS[wiring.sync.mode](
        wiring.routes,
        engine,
        local,
        bucket=wiring.sync.bucket,
        seconds=wiring.sync.seconds,
        device=wiring.device,
        listener=listener,
    )


def needs_listener(wiring: Wiring, engine: int) -> bool:
    """Whether trainer ranks of other hosts send to an engine."""
    host = wiring.engines[engine][0].host
    return any(wiring.trainer[source].host != host for source in wiring.sources(engine))


def connect_to(endpoint: Endpoint, stream: str) -> PairChannel:
    """Open a stream to an endpoint on another host."""
    limit = endpoint.bucket + TRAILER
    return connect(endpoint.listener, stream, endpoint.seconds, bucket=limit)
