"""The process group of a job whose ranks torchrun started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.cluster.ranks_store import RanksStore


def join(store: RanksStore) -> Any:
    """Make the job's process group on this rank's device, and one of gloo for results."""
    import torch.distributed as dist

    from megatron_bridge.runtime import device

    device.select(store.local_rank)
    dist.init_process_group(
        device.backend(), store=store.for_collectives, rank=store.rank, world_size=store.world
    )
    return dist.new_group(backend="gloo")
