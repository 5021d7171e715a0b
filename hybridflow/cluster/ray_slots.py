"""The slots of a pool on Ray: bundles of a placement group, in the order of ranks."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hybridflow.cluster.session import Place

GROUPS_PER_SLOT = 8
"""How many groups may share a slot: each takes this fraction of it."""


@dataclass(frozen=True)
class Slots:
    """A placement group, its bundles in the order of ranks, and whether each holds a GPU."""

    placement: Any
    bundles: tuple[int, ...]
    gpus: bool

    def options(self, chosen: Iterable[int]) -> list[dict[str, Any]]:
        """Ray's options of what takes a share of each of the ``chosen`` slots."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = 1 / GROUPS_PER_SLOT
        return [
            {
                "num_cpus": share,
                "num_gpus": share if self.gpus else 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    self.placement, placement_group_bundle_index=self.bundles[slot]
                ),
            }
            for slot in chosen
        ]


def place(placement: Any, gpus: bool, seconds: float) -> tuple[Slots, tuple[Place, ...]]:
    """The slots of a ready placement group and where each is; the node with most comes first.

    Raises:
        TimeoutError: the slots did not say within ``seconds`` which GPUs they hold.
    """
    from ray.util.placement_group import placement_group_table

    node_of = placement_group_table(placement)["bundles_to_node_id"]
    count = Counter(node_of.values())
    order = sorted(node_of, key=lambda bundle: (-count[node_of[bundle]], node_of[bundle], bundle))
    slots = Slots(placement, tuple(order), gpus)
    numbers = _gpus_of(slots, seconds) if gpus else [None] * len(order)
    return slots, tuple(map(Place, (node_of[bundle] for bundle in order), numbers))


def _gpus_of(slots: Slots, seconds: float) -> list[int]:
    """The GPU of each slot, asked within it: whatever works there later gets the same from Ray."""
    import ray

    asked = [
        ray.remote(_own_gpu).options(**option, max_retries=0).remote()
        for option in slots.options(range(len(slots.bundles)))
    ]
    ready, late = ray.wait(asked, num_returns=len(asked), timeout=seconds)
    if late:
        raise TimeoutError(
            f"waited {seconds:g} s for slots to say which GPUs they hold: {len(ready)} of "
            f"{len(asked)} did"
        )
    return ray.get(asked)


def _own_gpu() -> int:
    """The number, on its machine, of the GPU that Ray gave to this task."""
    import ray

    (name,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    if not name.isdigit():
        raise ValueError(
            f"Ray knows a GPU as {name}; start it with GPUs by number (CUDA_VISIBLE_DEVICES=0,1)"
        )
    return int(name)
