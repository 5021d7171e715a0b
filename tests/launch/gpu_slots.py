"""A driver that asks a cluster's pools where their slots are, and its workers for their GPUs."""

import os
import sys

from hybridflow.cluster import RaySession
from hybridflow.cluster.host import this_node
from hybridflow.cluster.transfer import GATHER, transfer


class Holder:
    """Says which GPUs Ray gave it."""

    def __init__(self, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        self._rank = rank

    @transfer(GATHER)
    def found(self) -> tuple[str, str]:
        """Its node and what it sees."""
        return this_node().id, os.environ["CUDA_VISIBLE_DEVICES"]


if __name__ == "__main__":
    with RaySession(1, 4, address=sys.argv[1], start_timeout=120) as session:
        pools = [session.pool("first", 3), session.pool("second", 1)]
        for pool in pools:
            group = session.group(pool.name, Holder, pool.slots, pool)
            beside = session.group(
                f"beside-{pool.name}", Holder, 1, pool, first_slot=pool.slots - 1
            )
            seen = [*group.run(Holder.found), *beside.run(Holder.found)]
            told = [(place.node, str(place.gpu)) for place in (*pool.places, pool.places[-1])]
            assert seen == told, (seen, told)
        print("gpus", *sorted(str(place.gpu) for pool in pools for place in pool.places))
