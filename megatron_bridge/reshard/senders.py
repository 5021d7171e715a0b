"""Chooses senders: of a copy's holders the nearest, and of equals the least busy."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from megatron_bridge.reshard.plan import ReshardPlan
from megatron_bridge.reshard.traffic import LINKS, Link

# Runs that a sender which is as near as others should get, so that their bytes come out even.
_RUNS_PER_SENDER = 4

Nearest = tuple[Link, tuple[int, ...]]


class Seat(NamedTuple):
    """Where a rank runs. Ranks of one host and device share that device's memory.

    Attributes:
        host: name of the machine.
        device: of that machine; None: it has none of its own (CPU), and shares none.
    """

    host: str
    device: int | None


@dataclass(frozen=True, slots=True)
class Group:
    """Copies that one engine rank takes from the same holders; they are routed alike.

    Attributes:
        rank: within the engine.
        holders: trainer ranks.
        copies: their numbers, in plan order.
        bytes_before: of the group's copies before each one, and behind the last of all.
    """

    rank: int
    holders: tuple[int, ...]
    copies: list[int]
    bytes_before: list[int]

    @property
    def bytes(self) -> int:
        """Of all its copies."""
        return self.bytes_before[-1]

    def bytes_of(self, start: int, stop: int) -> int:
        """Of some of its copies."""
        return self.bytes_before[stop] - self.bytes_before[start]

    def cut(self, runs: int) -> list[int]:
        """Where it is cut into at most ``runs`` runs of about the same bytes."""
        steps = [self.bytes * step // runs for step in range(1, runs)]
        inner = {bisect_left(self.bytes_before, step) for step in steps}
        return sorted(inner | {0, len(self.copies)})


class Run(NamedTuple):
    """Consecutive copies of a group that one sender sends to one engine.

    Attributes:
        start, stop: places within the group.
        source: trainer rank.
        link: to the engine rank.
    """

    start: int
    stop: int
    source: int
    link: Link


class _Near:
    """Which holders are nearest to a seat."""

    def __init__(self, holders: tuple[int, ...], trainer: Sequence[Seat]) -> None:
        self._all = holders
        self._devices: dict[Seat, tuple[int, ...]] = {}
        self._hosts: dict[str, tuple[int, ...]] = {}
        for rank in holders:
            seat = trainer[rank]
            if seat.device is not None:
                self._devices[seat] = (*self._devices.get(seat, ()), rank)
            self._hosts[seat.host] = (*self._hosts.get(seat.host, ()), rank)

    def of(self, seat: Seat) -> tuple[Link, tuple[int, ...]]:
        """The kind of link to the nearest holders, and these."""
        if seat in self._devices:
            return "device", self._devices[seat]
        if seat.host in self._hosts:
            return "host", self._hosts[seat.host]
        return "network", self._all


def grouped(plan: ReshardPlan) -> list[Group]:
    """A plan's copies by engine rank and holders."""
    members: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, copy in enumerate(plan.copies):
        members.setdefault((copy.target_rank, copy.holders), []).append(number)
    before = plan.bytes_before
    return [
        Group(
            rank,
            holders,
            copies,
            list(accumulate((before[n + 1] - before[n] for n in copies), initial=0)),
        )
        for (rank, holders), copies in members.items()
    ]


def assign(
    groups: Sequence[Group], trainer: Sequence[Seat], engines: Sequence[Sequence[Seat]]
) -> list[list[list[Run]]]:
    """Runs that are each group's copies to each engine: ``[engine][group]``."""
    near = {group.holders: _Near(group.holders, trainer) for group in groups}
    nearest = [
        [near[group.holders].of(engine[group.rank]) for group in groups] for engine in engines
    ]
    busy = {link: [0] * len(trainer) for link in LINKS}
    found: list[list[list[Run]]] = [[[] for _ in groups] for _ in engines]
    # The largest find their sender first: the small ones then even out the loads.
    for negative, engine, group, start, stop in sorted(_pieces(groups, nearest)):
        link, senders = nearest[engine][group]
        load = busy[link]
        source = min(senders, key=load.__getitem__)
        load[source] -= negative
        found[engine][group].append(Run(start, stop, source, link))
    for of_engine in found:
        for runs in of_engine:
            runs.sort()
    return found


def _pieces(
    groups: Sequence[Group], nearest: Sequence[Sequence[Nearest]]
) -> Iterator[tuple[int, int, int, int, int]]:
    """What to find a sender for: (-bytes, engine, group, start, stop).

    A group is cut only where few ask the same senders: with many, whole groups even out.
    """
    demand = Counter(senders for of_engine in nearest for _, senders in of_engine)
    for engine, of_engine in enumerate(nearest):
        for number, (group, (_, senders)) in enumerate(zip(groups, of_engine, strict=True)):
            wanted = -(-_RUNS_PER_SENDER * len(senders) // demand[senders])
            for start, stop in pairwise(group.cut(wanted if len(senders) > 1 else 1)):
                yield -group.bytes_of(start, stop), engine, number, start, stop
