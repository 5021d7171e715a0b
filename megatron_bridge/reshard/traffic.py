"""What routes move, in bytes, and what other ways would."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Link = Literal["device", "host", "network"]
LINKS: tuple[Link, ...] = ("device", "host", "network")


class LinkBytes(NamedTuple):
    """Bytes per kind of link.

    Attributes:
        device: the sender runs on the receiver's own device; these bytes need not move.
        host: the sender runs on the receiver's host.
        network: between hosts.
    """

    device: int = 0
    host: int = 0
    network: int = 0

    @property
    def moved(self) -> int:
        """Bytes that leave a device."""
        return self.host + self.network


@dataclass(frozen=True)
class Traffic:
    """What one sync of all engines moves, in bytes of the engines' dtypes.

    Attributes:
        sent: by each trainer rank.
        received: by each engine's ranks: ``received[engine][rank]``.
        needed: what all engine ranks keep, without padding.
        lower_bound: what they keep and no trainer rank on their own device holds.
        model: all HuggingFace tensors once.
        gathered: moved by a sync that gathers whole tensors: trainer rank 0 receives what it does
            not hold, and broadcasts every tensor to every engine rank.
    """

    sent: tuple[LinkBytes, ...]
    received: tuple[tuple[LinkBytes, ...], ...]
    needed: int
    lower_bound: int
    model: int
    gathered: int

    @property
    def total(self) -> LinkBytes:
        """Of all ranks."""
        return LinkBytes(*map(sum, zip(*self.sent, strict=True)))

    @property
    def moved(self) -> int:
        """Bytes that leave a device; equals the lower bound."""
        return self.total.moved
