"""Which trainer rank sends which copy to which engine, and what that moves."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from megatron_bridge.reshard import senders
from megatron_bridge.reshard.plan import ReshardPlan
from megatron_bridge.reshard.senders import Run, Seat
from megatron_bridge.reshard.traffic import LINKS, Link, LinkBytes, Traffic


class Routes:
    """Senders of every copy to every engine. The same in every process."""

    def __init__(
        self, plan: ReshardPlan, trainer: Sequence[Seat], engines: Sequence[Sequence[Seat]]
    ) -> None:
        """See ``route``."""
        self.plan = plan
        self.trainer = tuple(trainer)
        self.engines = tuple(map(tuple, engines))
        self._groups = senders.grouped(plan)
        self._runs = senders.assign(self._groups, self.trainer, self.engines)
        self._of_rank: dict[int, list[int]] = {}
        for index, group in enumerate(self._groups):
            self._of_rank.setdefault(group.rank, []).append(index)

    def source(self, copy: int, engine: int) -> int:
        """The trainer rank that sends a copy to an engine."""
        return self._run(copy, engine).source

    def link(self, copy: int, engine: int) -> Link:
        """The kind of link that a copy to an engine takes."""
        return self._run(copy, engine).link

    def _run(self, copy: int, engine: int) -> Run:
        group, place = self._place[copy]
        runs = self._runs[engine][group]
        return runs[bisect_right(runs, place, key=_start) - 1]

    @cached_property
    def _place(self) -> list[tuple[int, int]]:
        """Of each copy: its group and its place there."""
        found = [(0, 0)] * len(self.plan.copies)
        for index, group in enumerate(self._groups):
            for place, copy in enumerate(group.copies):
                found[copy] = (index, place)
        return found

    def sends(self, trainer_rank: int) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """What a trainer rank sends: copies in plan order, by engine and rank within it."""
        found: dict[tuple[int, int], list[int]] = {}
        for engine, group, run in self._by_source.get(trainer_rank, ()):
            copies = self._groups[group].copies[run.start : run.stop]
            found.setdefault((engine, self._groups[group].rank), []).extend(copies)
        return {key: tuple(sorted(found[key])) for key in sorted(found)}

    @cached_property
    def _by_source(self) -> dict[int, list[tuple[int, int, Run]]]:
        found: dict[int, list[tuple[int, int, Run]]] = {}
        for engine, group, run in self._all_runs():
            found.setdefault(run.source, []).append((engine, group, run))
        return found

    def _all_runs(self) -> Iterator[tuple[int, int, Run]]:
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
            size = group.bytes_of(run.start, run.stop)
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


def _start(run: Run) -> int:
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
