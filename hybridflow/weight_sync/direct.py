"""How a trainer rank reaches engines of other hosts in direct transport."""

from __future__ import annotations

from hybridflow.weight_sync.endpoint import Endpoint
from hybridflow.weight_sync.pairs import PairChannel, connect
from hybridflow.weight_sync.streams import TRAILER


def connect_to(endpoint: Endpoint, stream: str) -> PairChannel:
    """Open a stream to an endpoint on another host."""
    limit = endpoint.bucket + TRAILER
    return connect(endpoint.listener, stream, endpoint.seconds, bucket=limit)
