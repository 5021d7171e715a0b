"""A driver that a test interrupts: prints its mark once its workers have children of their own."""

from hybridflow.cluster import RaySession
from tests.cluster.workers import Worker

if __name__ == "__main__":
    with RaySession(1, 1) as session:
        group = session.group("held", Worker, 1, session.pool("all", 1))
        group.run(Worker.spawn)
        hanging = group.call(Worker.sleep, 600.0)
        print(session.mark, flush=True)
        hanging.result()
