"""A session on Ray: resource pools over placement groups, and worker groups in them."""

import atexit
import secrets
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.cluster import processes, ray_runtime, ray_slots
from hybridflow.cluster.group import Ranks
from hybridflow.cluster.ray_slots import GROUPS_PER_SLOT
from hybridflow.cluster.session import GroupOrder, Pool, Session

_END_SECONDS = 60.0
"""How long the other nodes may take to end a group's processes."""


class RaySession(Session):
    """One run's processes on Ray.

    Without ``address`` a Ray is started on this machine, with as many slots as devices are asked
    for, and ends with the session. With ``address`` (HOST:PORT) the session joins that cluster
    from one of its nodes. Where the cluster has GPUs a slot is a GPU, elsewhere a CPU slot.

    ``log_dir`` takes each worker's output as ``<group>-<rank>.log``. Timeouts are in seconds.
    ``mark`` is in the environment of every process that the session starts.
    """

    def __init__(
        self,
        nodes: int = 1,
        devices_per_node: int = 1,
        *,
        address: str | None = None,
        log_dir: str | Path | None = None,
        object_store_bytes: int = 1 << 30,
        start_timeout: float = 600.0,
        call_timeout: float = 3600.0,
    ) -> None:
        if nodes < 1 or devices_per_node < 1:
            raise ValueError(f"nodes={nodes} and devices_per_node={devices_per_node} must be >= 1")
        if nodes > 1 and address is None:
            raise ValueError(
                f"nodes={nodes} needs the address of a Ray cluster; start one with "
                "launch/ray_head.sh and launch/ray_worker.sh, then pass its HOST:PORT"
            )
        ray_runtime.refuse_second()
        super().__init__(start_timeout, call_timeout)
        self._slots = nodes * devices_per_node
        self._taken = 0
        self.mark = f"hybridflow-{secrets.token_hex(8)}/"
        self._placements: list[Any] = []
        self._pools: set[str] = set()
        self._taken_by: dict[str, set[tuple[str, int]]] = {}  # (pool, slot) of each group
        self._open = True
        self._scratch = None if log_dir else tempfile.TemporaryDirectory(prefix="hybridflow-log-")
        self._logs = Path(log_dir or self._scratch.name).absolute()  # type: ignore[union-attr]
        self._ray_mark = f"{self.mark.rstrip('/')}-ray/"
        if address is None:
            ray_runtime.start_local(self._slots, object_store_bytes, self._ray_mark)
        else:
            ray_runtime.join(address)
        atexit.register(self.close)
        try:
            self._gpus = self._wait_for_nodes(nodes, devices_per_node)
        except BaseException:
            self.close()
            raise

    def _wait_for_nodes(self, nodes: int, devices: int) -> bool:
        """Waits until enough nodes have joined; whether their devices are GPUs."""
        import ray

        deadline = time.monotonic() + self._start_seconds
        while True:
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            gpus = any(resources.get("GPU", 0) for resources in alive)
            kind = "GPU" if gpus else "CPU"
            fit = [resources for resources in alive if resources.get(kind, 0) >= devices]
            if len(fit) >= nodes:
                return gpus
            if time.monotonic() > deadline:
                sizes = [int(resources.get(kind, 0)) for resources in alive]
                raise TimeoutError(
                    f"waited {self._start_seconds:g} s for {nodes} nodes with {devices} {kind} "
                    f"slots each; the cluster's nodes have {sizes}. Start further nodes, or lower "
                    "nodes or devices_per_node"
                )
            time.sleep(0.2)

    def pool(self, name: str, slots: int) -> Pool:
        """Reserves slots, on as few nodes as possible; slots of one node are neighbours, those of
        the node with most of them first."""
        from ray.util.placement_group import placement_group

        if name in self._pools:
            raise ValueError(f"the session has a pool '{name}' already; choose another name")
        if not 1 <= slots <= self._slots - self._taken:
            raise ValueError(
                f"pool '{name}' of {slots} slots: {self._slots - self._taken} of the cluster's "
                f"{self._slots} are left"
            )
        bundle = {"CPU": 1.0, "GPU": 1.0} if self._gpus else {"CPU": 1.0}
        placement = placement_group([dict(bundle) for _ in range(slots)], strategy="PACK")
        self._placements.append(placement)
        if not placement.wait(self._start_seconds):
            raise TimeoutError(
                f"waited {self._start_seconds:g} s for pool '{name}' of {slots} x {bundle}: other "
                "jobs may hold the cluster's devices"
            )
        self._taken += slots
        self._pools.add(name)
        held, places = ray_slots.place(placement, self._gpus, self._start_seconds)
        return Pool(name, places, held)

    def _ranks(self, order: GroupOrder) -> Ranks:
        from hybridflow.cluster.ray_ranks import ActorRanks

        mark = f"{self.mark}{order.name}/"
        slots = order.slots()
        options = self._options(order, slots, mark)
        pool = order.pool
        one_node = pool is not None and len({pool.places[slot].node for slot in slots}) == 1
        surroundings = [
            self._surroundings(f"{order.name}-{rank}", one_node)
            for rank in range(order.layout.world)
        ]
        end = partial(self._end_processes, mark)
        return ActorRanks(order.worker_class, order.init, options, surroundings, end)

    def _options(self, order: GroupOrder, slots: range, mark: str) -> list[dict[str, Any]]:
        variables = {
            processes.MARK: mark,
            "OMP_NUM_THREADS": str(order.threads),
            "MKL_NUM_THREADS": str(order.threads),
            # Each step frees and takes the same buffers: keep them, or every step faults its pages
            # in anew.
            "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
            "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
        }
        common = {"num_cpus": 0, "max_restarts": 0, "runtime_env": {"env_vars": variables}}
        if order.pool is None:
            return [{**common, "scheduling_strategy": "SPREAD"} for _ in range(order.layout.world)]
        self._take(order.name, order.pool, slots)
        return [{**common, **share} for share in order.pool.handle.options(slots)]

    def _take(self, name: str, pool: Pool, slots: range) -> None:
        """Notes who takes the slots; ``ValueError`` when one of them is full."""
        working = self._register.working()
        for slot in slots:
            sharing = sum(
                group in working and (pool.name, slot) in taken
                for group, taken in self._taken_by.items()
            )
            if sharing >= GROUPS_PER_SLOT:
                raise ValueError(
                    f"group '{name}': slot {slot} of pool '{pool.name}' holds {GROUPS_PER_SLOT} "
                    "groups, the most that may share one"
                )
        self._taken_by[name] = {(pool.name, slot) for slot in slots}

    def _surroundings(self, label: str, one_node: bool) -> Any:
        from hybridflow.cluster.ray_ranks import Surroundings

        paths = tuple(str(Path(path).absolute()) for path in sys.path)
        address = "127.0.0.1" if one_node else None
        return Surroundings(str(Path.cwd()), paths, str(self._logs / f"{label}.log"), address)

    def _end_processes(self, mark: str) -> None:
        """Ends what carries the mark, on every node of the cluster."""
        try:
            elsewhere = self._end_elsewhere(mark)
        finally:  # also without a Ray that answers
            processes.end_marked(mark)
        if elsewhere:
            self._wait_for_ends(elsewhere, mark)

    def _wait_for_ends(self, elsewhere: list[Any], mark: str) -> None:
        import ray

        done, late = ray.wait(elsewhere, num_returns=len(elsewhere), timeout=_END_SECONDS)
        if late:
            raise TimeoutError(
                f"{len(late)} of {len(elsewhere)} other nodes did not end the processes of {mark} "
                f"within {_END_SECONDS:g} s"
            )
        ray.get(done)

    def _end_elsewhere(self, mark: str) -> list[Any]:
        """Begins the same on the other nodes."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = ray.get_runtime_context().get_node_id()
        end = ray.remote(processes.end_marked)
        return [
            end.options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(mark)
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] != here
        ]

    def close(self) -> None:
        """Ends every process of the session, children of workers included. Safe to call again."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.close)
        problems = self._register.close()
        for step in (self._give_back, self._leave_ray, self._end_rest):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - raised below, after the other steps
                problems.append(error)
        if problems:
            raise problems[0]

    def _give_back(self) -> None:
        from ray.util.placement_group import remove_placement_group

        for placement in self._placements:
            remove_placement_group(placement)

    def _leave_ray(self) -> None:
        ray_runtime.leave(self._ray_mark)

    def _end_rest(self) -> None:
        processes.end_marked(self.mark, patience=0.0)
        if self._scratch is not None:
            self._scratch.cleanup()
