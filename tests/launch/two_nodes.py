"""A driver that joins a cluster of two nodes with one slot each, and meets a rank on either."""

import sys

from hybridflow.cluster import RaySession
from megatron_bridge.layout import ParallelLayout
from tests.cluster.workers import Worker

if __name__ == "__main__":
    with RaySession(2, 1, address=sys.argv[1], start_timeout=120) as session:
        group = session.group("both", Worker, ParallelLayout(dp=2), session.pool("all", 2))
        print("totals", *group.run(Worker.total, 5))
        print("children", *group.run(Worker.spawn))
        pids = [place["pid"] for place in group.run(Worker.describe)]
        print("workers", *pids)
