"""Which devices roles take: pools on the cluster's hosts, and rollout servers within a pool.

A run places its servers with the same arithmetic that ``hybridflow check`` and ``plan-sync`` use.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from math import ceil

from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard.hybrid_engine import assignment

Engines = tuple[tuple[int, ...], ...]
Place = tuple[int, int]
"""A host and a device of it."""


def packed(pools: Iterable[int], hosts: int, devices: int) -> list[tuple[Place, ...]]:
    """Places of each pool's slots, for pools of these sizes on equal hosts.

    As Ray's PACK strategy does: the emptiest host takes as many slots as it has room for, then the
    next. Where the pools need more hosts there are more. So a pool's slots begin on the host that
    has most of them.
    """
    sizes = list(pools)
    room = [devices] * max(hosts, ceil(sum(sizes) / devices))
    found = []
    for size in sizes:
        parts: list[list[Place]] = []
        while size:
            host = max(range(len(room)), key=room.__getitem__)
            taken = min(size, room[host])
            first = devices - room[host]
            parts.append([(host, first + n) for n in range(taken)])
            room[host] -= taken
            size -= taken
        found.append(tuple(place for part in parts for place in part))
    return found


def engine_slots(
    hosts: Sequence[Hashable], tp: int, count: int, trainer: ParallelLayout | None = None
) -> Engines:
    """The slots of a pool that the ranks of each of ``count`` rollout servers take.

    A server's ranks are on one host. Beside a trainer whose tp they divide they take its devices so
    that training shards are reused (the 3D-HybridEngine's assignment), else neighbours.

    Args:
        hosts: of each slot; slots of one host are neighbours.
        tp: ranks of a server.
        trainer: layout of the trainer on these slots, rank r on slot r; None: it is elsewhere.

    Returns:
        ``engines[engine][rank]``: a slot.

    Raises:
        ValueError: not as many fit.
    """
    if trainer is not None and trainer.tp % tp == 0:
        reusing = assignment(trainer, tp)
        whole = [engine for engine in reusing if len({hosts[slot] for slot in engine}) == 1]
        if len(whole) >= count:
            return tuple(whole[:count])
    runs = [list(run) for _, run in groupby(range(len(hosts)), key=hosts.__getitem__)]
    found = [tuple(run[at : at + tp]) for run in runs for at in range(0, len(run) - tp + 1, tp)]
    if len(found) < count:
        sizes = " + ".join(str(len(run)) for run in runs)
        raise ValueError(
            f"{count} rollout server(s) of tp={tp} need {tp} devices of one node each, and their "
            f"{len(hosts)} devices are {sizes} of {len(runs)} node(s): choose a tp that divides "
            "the devices of a node, or fewer servers"
        )
    return tuple(found[:count])
