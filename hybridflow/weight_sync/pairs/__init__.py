"""Streams of buckets between two processes, on one host or two, over a process group of theirs."""

from hybridflow.weight_sync.pairs.channel import Listener, connect
from hybridflow.weight_sync.pairs.link import Endpoint, PairError, PairTimeout
from hybridflow.weight_sync.pairs.stream import PairChannel

__all__ = ["Endpoint", "Listener", "PairChannel", "PairError", "PairTimeout", "connect"]
