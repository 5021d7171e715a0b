"""What tests/cluster/test_ranks.py runs on each rank of torchrun: ranks_job.py WAY."""

import os
import signal
import sys

import torch
import torch.distributed as dist

from hybridflow.batch import Batch
from hybridflow.cluster import (
    DATA_PARALLEL,
    GATHER,
    ClusterError,
    RanksSession,
    RanksStore,
    serve,
    transfer,
)
from hybridflow.recipe.axes import Axis
from hybridflow.workers.job_group import join
from megatron_bridge.layout import ParallelLayout


class Adder:
    """Adds over the ranks; may fail on one of them alone."""

    def __init__(self, rank: int, world: int, rendezvous: tuple[str, int], *, start: int) -> None:
        self._rank, self._start = rank, start

    @transfer(DATA_PARALLEL)
    def double(self, batch: Batch) -> Batch:
        return batch.with_field("x", Axis.PROMPTS, 2 * batch["x"])

    @transfer(GATHER)
    def total(self, way: str) -> int:
        if self._rank == 1 and way == "raise":
            raise KeyError("units")
        if self._rank == 1 and way == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.tensor(self._start + self._rank)
        dist.all_reduce(total)
        return int(total)


class Alone:
    """No rank of a model."""

    def __init__(self, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        self._rank = rank

    @transfer(GATHER)
    def where(self) -> int:
        return os.getpid()


def main(way: str) -> int:
    store = RanksStore(seconds=120)
    if store.rank == 0:
        store.tell("greeting", "hello")
    assert store.hear("greeting") == "hello"
    try:
        if store.rank:
            serve(store, join)
            print(f"rank {store.rank} was let go", flush=True)
        else:
            drive(store, way)
    except (ClusterError, ConnectionError) as error:
        print(f"rank {store.rank} was told: {str(error).splitlines()[0]}", flush=True)
        os._exit(1)
    return 0


def drive(store: RanksStore, way: str) -> None:
    with RanksSession(store, join, call_timeout=120) as session:
        pool = session.pool("all", 2)
        layout = ParallelLayout(dp=2)
        group = session.group("adder", Adder, layout, pool, {"start": 10})
        other = session.group("other", Adder, layout, pool, {"start": 20})
        rows = Batch({"x": torch.arange(5)}, {"x": Axis.PROMPTS}, 5, 1)
        doubled = group.run(Adder.double, rows)
        assert doubled["x"].tolist() == [0, 2, 4, 6, 8], doubled
        assert other.run(Adder.total, "well") == [41, 41]
        calls = [g.call(Adder.total, "well") for g in (group, other) * 20]
        assert [call.result() for call in calls] == [[21, 21], [41, 41]] * 20
        alone = session.group("alone", Alone, 2, None, {})
        assert alone.run(Alone.where) == [os.getpid()] * 2, "on threads of the driver"
        print(f"rank 0 has {group.run(Adder.total, way)}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
