"""What the two sides of a publication tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODES = ("standby", "bucketed")
Link = tuple[int, int]
"""An engine and a rank within it."""


@dataclass(frozen=True)
class Endpoint:
    """Where an engine takes a version from.

    Attributes:
        mode: "standby" or "bucketed".
        host: the engine's, as its seats name it.
        nonce: of this publication to this engine.
        bucket: most bytes of a bucket.
        seconds: deadline of each wait for the other side.
        slots: standby: file of each engine rank's slot, on the engine's host.
        areas: bucketed: file of two buckets and bytes of each, by trainer rank of the engine's host
            and engine rank.
        listener: what reaches the engine's worker from other hosts.
    """

    engine: int
    version: int
    mode: str
    host: str
    nonce: str
    bucket: int
    seconds: float
    slots: tuple[str, ...] = ()
    areas: Mapping[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    listener: Any = None


@dataclass(frozen=True)
class Sent:
    """What a trainer rank says it sent to one engine rank.

    Attributes:
        digest: SHA-256 over its copies' bytes in plan order; empty where there is a fault.
        bytes: counted as they were sent.
        seconds: that it took, waits included.
        fault: why not all was sent.
    """

    digest: str
    bytes: int
    seconds: float
    fault: str = ""


def stream_name(trainer_rank: int, link: Link) -> str:
    """What a stream is called on both sides and in errors."""
    return f"trainer {trainer_rank} to engine {link[0]} rank {link[1]}"
