"""Transfer protocols: how a call's arguments go to the ranks and how their results come back.

A protocol is two pure functions. ``split`` gives each rank its ``Piece`` (None: the rank is not
called); ranks that get the same object share one copy of it in the object store. ``merge`` takes
one result per rank (None where the rank was not called).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeVar

from hybridflow.batch import Batch, Ragged
from megatron_bridge.layout import ParallelLayout

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Piece:
    """The arguments of one rank."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Transfer(Protocol):
    """``turn`` counts the calls of a group, from 0."""

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], layout: ParallelLayout, turn: int = 0
    ) -> list[Piece | None]: ...

    def merge(self, results: Sequence[Any], layout: ParallelLayout) -> Any: ...


class OneToAll:
    """Every rank gets the same arguments; rank 0's result is the call's."""

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], layout: ParallelLayout, turn: int = 0
    ) -> list[Piece | None]:
        return [Piece(tuple(args), kwargs)] * layout.world

    def merge(self, results: Sequence[Any], layout: ParallelLayout) -> Any:
        return results[0]


class Gather(OneToAll):
    """Every rank gets the same arguments; the result is the list of all results by rank."""

    def merge(self, results: Sequence[Any], layout: ParallelLayout) -> Any:
        return list(results)


class DataParallel:
    """Batches among the arguments are split over the data-parallel ranks; all ranks of one
    data-parallel rank get the same piece, everything else goes to all.

    The result comes from the last pipeline stage's tensor-parallel rank 0, in data-parallel
    order: batches, ragged fields and lists are joined; of anything else (metrics, None) that of
    data-parallel rank 0 counts.
    """

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], layout: ParallelLayout, turn: int = 0
    ) -> list[Piece | None]:
        parts = self.parts(args, kwargs)

        def cut(value: Any) -> list[Any]:
            if not isinstance(value, Batch):
                return [value] * layout.dp
            return value.split(layout.dp) if parts == 1 else dealt(value, parts, layout.dp)

        args_of_dp = list(zip(*map(cut, args), strict=True)) or [()] * layout.dp
        named = {name: cut(value) for name, value in kwargs.items()}
        pieces = [
            Piece(args_of_dp[dp], {name: cuts[dp] for name, cuts in named.items()})
            for dp in range(layout.dp)
        ]
        return [pieces[layout.coordinates(rank).dp] for rank in range(layout.world)]

    @staticmethod
    def parts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """How many parts each rank cuts its piece into."""
        return 1

    def merge(self, results: Sequence[Any], layout: ParallelLayout) -> Any:
        by_dp = [results[rank] for rank in self.sources(layout)]
        for kind, join in ((Batch, Batch.concat), (Ragged, Ragged.concat), (list, _join_lists)):
            if all(isinstance(result, kind) for result in by_dp):
                return join(by_dp)
        return by_dp[0]

    @staticmethod
    def sources(layout: ParallelLayout) -> list[int]:
        """The ranks whose results count, by data-parallel rank."""
        places = {rank: layout.coordinates(rank) for rank in range(layout.world)}
        last = [rank for rank, at in places.items() if at.tp == 0 and at.pp == layout.pp - 1]
        return sorted(last, key=lambda rank: places[rank].dp)


class MiniBatches(DataParallel):
    """``DataParallel`` for calls that work on mini-batches one after the other.

    The k-th mini-batches of all ranks together are the k-th run of the batch's prompts, so that an
    optimizer step sees the same samples whatever the number of ranks. An argument has their number
    as ``mini_batches``.
    """

    @staticmethod
    def parts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        told = (getattr(value, "mini_batches", None) for value in (*args, *kwargs.values()))
        return next((number for number in told if number is not None), 1)


def dealt(batch: Batch, parts: int, ranks: int) -> list[Batch]:
    """Each rank's share of every one of ``parts`` runs of the batch, in their order.

    Prompts that do not divide by both are split in plain runs.
    """
    if batch.prompts % (parts * ranks):
        return batch.split(ranks)
    shares = [part.split(ranks) for part in batch.split(parts)]
    return [Batch.concat(list(share)) for share in zip(*shares, strict=True)]


class RoundRobin:
    """The whole call goes to one rank, each in turn: for workers without state."""

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], layout: ParallelLayout, turn: int = 0
    ) -> list[Piece | None]:
        chosen = turn % layout.world
        piece = Piece(tuple(args), kwargs)
        return [piece if rank == chosen else None for rank in range(layout.world)]

    def merge(self, results: Sequence[Any], layout: ParallelLayout) -> Any:
        return next((result for result in results if result is not None), None)


ONE_TO_ALL = OneToAll()
GATHER = Gather()
DATA_PARALLEL = DataParallel()
MINI_BATCHES = MiniBatches()
ROUND_ROBIN = RoundRobin()


def transfer(protocol: Transfer, *, beside: bool = False) -> Callable[[Method], Method]:
    """Declares the protocol of a worker's method.

    A method ``beside`` others runs on a thread of its own while one of these runs; among
    themselves such methods keep their order too.
    """

    def declare(method: Method) -> Method:
        setattr(method, "transfer", protocol)  # noqa: B010
        setattr(method, "beside", beside)  # noqa: B010
        return method

    return declare


def transfer_of(method: Callable[..., Any]) -> Transfer:
    """The protocol that a worker's method declares."""
    found = getattr(method, "transfer", None)
    if found is None:
        raise ValueError(
            f"{method.__qualname__} declares no transfer protocol; put @transfer(ONE_TO_ALL), "
            "@transfer(DATA_PARALLEL), @transfer(GATHER) or @transfer(ROUND_ROBIN) above it"
        )
    return found


def _join_lists(lists: Sequence[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))
