"""Which holder sends which copy to which engine: the nearest, and of equals the least busy."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megatron_bridge.reshard.plan import ReshardPlan
from megatron_bridge.reshard.traffic import LINKS, Link, LinkBytes, Traffic

# Runs that a sender which is as near as others should get, so that their bytes come out even.
_RUNS_PER_SENDER = 4


class Seat(NamedTuple):
    """Where a rank runs. Ranks of one host and device share that device's memory.

    Attributes:
        host: name of the machine.
        device: of that machine; None: it has none of its own (CPU), and shares none.
    """

    host: str
    device: int | None


@dataclass(frozen=True, slots=True)
class _Group:
    """Copies that one engine rank takes from the same holders; they are routed alike."""

    rank: int
    holders: tuple[int, ...]
    copies: list[int]
    bytes_before: list[int]

    @property
    def bytes(self) -> int:
        return self.bytes_before[-1]

    def cut(self, runs: int) -> list[int]:
        """Where it is cut into at most ``runs`` runs of about the same bytes."""
        steps = [self.bytes * step // runs for step in range(1, runs)]
        inner = {bisect_left(self.bytes_before, step) for step in steps}
        return sorted(inner | {0, len(self.copies)})


class _Run(NamedTuple):
    """Consecutive copies of a group that one sender sends to one engine."""

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


class Routes:
    """Senders of every copy to every engine. The same in every process."""

    def __init__(
        self, plan: ReshardPlan, trainer: Sequence[Seat], engines: Sequence[Sequence[Seat]]
    ) -> None:
        """See ``route``."""
        self.plan = plan
        self.trainer = tuple(trainer)
        self.engines = tuple(map(tuple, engines))
        self._group_of: list[tuple[int, int]] = []
        self._groups = self._grouped()
        self._of_rank: dict[int, list[int]] = {}
        for index, group in enumerate(self._groups):
            self._of_rank.setdefault(group.rank, []).append(index)
        self._runs = self._assign()

    def _grouped(self) -> list[_Group]:
        index: dict[tuple[int, tuple[int, ...]], int] = {}
        members: list[list[int]] = []
        for number, copy in enumerate(self.plan.copies):
            group = index.setdefault((copy.target_rank, copy.holders), len(members))
            if group == len(members):
                members.append([])
            self._group_of.append((group, len(members[group])))
            members[group].append(number)
        before = self.plan.bytes_before
        return [
            _Group(
                rank,
                holders,
                copies,
                list(accumulate((before[n + 1] - before[n] for n in copies), initial=0)),
            )
            for (rank, holders), copies in zip(index, members, strict=True)
        ]

    def _assign(self) -> list[list[tuple[_Run, ...]]]:
        """Runs by engine and group. The largest find their sender first, so that loads are even."""
        near = {group.holders: _Near(group.holders, self.trainer) for group in self._groups}
        wanted = [
            [near[group.holders].of(engine[group.rank]) for group in self._groups]
            for engine in self.engines
        ]
        demand: dict[tuple[int, ...], int] = {}
        for nearest in wanted:
            for _, senders in nearest:
                demand[senders] = demand.get(senders, 0) + 1
        pieces: list[tuple[int, int, int, int, int]] = []
        for engine, nearest in enumerate(wanted):
            for number, (group, (_, senders)) in enumerate(zip(self._groups, nearest, strict=True)):
                runs = -(-_RUNS_PER_SENDER * len(senders) // demand[senders])
                stops = group.cut(runs if len(senders) > 1 else 1)
                for start, stop in zip(stops, stops[1:], strict=False):
                    size = group.bytes_before[stop] - group.bytes_before[start]
                    pieces.append((-size, engine, number, start, stop))
        load = {link: [0] * len(self.trainer) for link in LINKS}
        found: list[list[list[_Run]]] = [[[] for _ in self._groups] for _ in self.engines]
        for negative, engine, number, start, stop in sorted(pieces):
            link, senders = wanted[engine][number]
            busy = load[link]
            source = min(senders, key=busy.__getitem__)
            busy[source] -= negative
            found[engine][number].append(_Run(start, stop, source, link))
        return [[tuple(sorted(runs)) for runs in groups] for groups in found]

    def source(self, copy: int, engine: int) -> int:
        """The trainer rank that sends a copy to an engine."""
        return self._run(copy, engine).source

    def link(self, copy: int, engine: int) -> Link:
        """The kind of link that a copy to an engine takes."""
        return self._run(copy, engine).link

    def _run(self, copy: int, engine: int) -> _Run:
        group, place = self._group_of[copy]
        runs = self._runs[engine][group]
        return runs[bisect_right(runs, place, key=_start) - 1]

    def sends(self, trainer_rank: int) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """What a trainer rank sends: copies in plan order, by engine and rank within it."""
        found: dict[tuple[int, int], list[int]] = {}
        for engine, group, run in self._by_source.get(trainer_rank, ()):
            copies = self._groups[group].copies[run.start : run.stop]
            found.setdefault((engine, self._groups[group].rank), []).extend(copies)
        return {key: tuple(sorted(found[key])) for key in sorted(found)}

    @cached_property
    def _by_source(self) -> dict[int, list[tuple[int, int, _Run]]]:
        found: dict[int, list[tuple[int, int, _Run]]] = {}
        for engine, group, run in self._all_runs():
            found.setdefault(run.source, []).append((engine, group, run))
        return found

    def _all_runs(self) -> Iterator[tuple[int, int, _Run]]:
        for engine, groups in enumerate(self._runs):
            for group, runs in enumerate(groups):
                for run in runs:
                    yield engine, group, run

    def receives(self, engine: int, rank: int) -> Mapping[int, tuple[int, ...]]:
        """What a rank of an engine receives: copies in plan order, by trainer rank."""
        found: dict[int, list[int]] = {}
        for group in self._of_rank.get(rank, ()):
            for run in self._runs[engine][group]:
                copies = self._groups[group].copies[run.start : run.stop]
                found.setdefault(run.source, []).extend(copies)
        return {source: tuple(sorted(found[source])) for source in sorted(found)}

    def traffic(self) -> Traffic:
        """Bytes of one sync of all engines."""
        sent = [[0] * len(LINKS) for _ in self.trainer]
        received = [[[0] * len(LINKS) for _ in engine] for engine in self.engines]
        for engine, index, run in self._all_runs():
            group, kind = self._groups[index], LINKS.index(run.link)
            size = group.bytes_before[run.stop] - group.bytes_before[run.start]
            sent[run.source][kind] += size
            received[engine][group.rank][kind] += size
        model = self.plan.model_bytes
        ranks = len(self.engines) * len(self.plan.targets)
        return Traffic(
            tuple(LinkBytes(*rank) for rank in sent),
            tuple(tuple(LinkBytes(*rank) for rank in engine) for engine in received),
            len(self.engines) * self.plan.bytes_before[-1],
            self._lower_bound(),
            model,
            model * ranks + model - self.plan.held_bytes[0],
        )

    def _lower_bound(self) -> int:
        """Bytes that engine ranks keep and no trainer rank on their device holds."""
        on: dict[Seat, set[int]] = {}
        for rank, seat in enumerate(self.trainer):
            if seat.device is not None:
                on.setdefault(seat, set()).add(rank)
        return sum(
            group.bytes
            for engine in self.engines
            for group in self._groups
            if on.get(engine[group.rank], set()).isdisjoint(group.holders)
        )


def _start(run: _Run) -> int:
    return run.start


def route(plan: ReshardPlan, trainer: Sequence[Seat], engines: Sequence[Sequence[Seat]]) -> Routes:
    """Choose who sends each copy: a holder on the receiver's device, else on its host, else any.

    Among holders that are as near, bytes are spread evenly. Deterministic.

    Args:
        plan: of one engine.
        trainer: where each trainer rank runs.
        engines: where each rank of each engine runs; all of the plan's layout.

    Raises:
        ValueError: a number of seats that is not the layout's.
    """
    if len(trainer) != plan.layout.world:
        raise ValueError(
            f"{len(trainer)} seats for the {plan.layout.world} ranks of the trainer layout "
            f"{plan.layout}; give one per rank"
        )
    wrong = [f"engine {n} has {len(e)}" for n, e in enumerate(engines) if len(e) != plan.ranks]
    if wrong:
        raise ValueError(
            f"an engine of this plan has {plan.ranks} ranks, {', '.join(wrong)} seats; give one "
            "per rank"
        )
    return Routes(plan, trainer, engines)
