"""Megatron's process groups for one ParallelLayout, and this process's place in it."""

from typing import Any

import torch.distributed as dist

from megatron_bridge.layout import Coordinates, ParallelLayout
from megatron_bridge.runtime import device

_layout: ParallelLayout | None = None


def initialize(layout: ParallelLayout, seed: int = 0, *, timeout_minutes: int = 30) -> None:
    """Build Megatron's process groups and seed its generators.

    Args:
        layout: must fill the whole process group: ``layout.world`` ranks.
        seed: base of every rank's random state; tensor-parallel ranks draw different numbers.
        timeout_minutes: how long a collective in these groups may wait for its peers.

    Raises:
        ValueError: when torch.distributed is not up, or its size is not the layout's.
    """
    global _layout
    if not dist.is_initialized():
        raise ValueError(
            "no process group; call torch.distributed.init_process_group("
            f"'{device.backend()}', ...) before runtime.parallel.initialize"
        )
    if dist.get_world_size() != layout.world:
        raise ValueError(
            f"{layout} needs {layout.world} ranks, the process group has "
            f"{dist.get_world_size()}; start one process per rank of the layout"
        )
    device.prepare()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        distributed_timeout_minutes=timeout_minutes,
    )
    # Stages draw different numbers, as in Megatron's own training; data-parallel replicas equal.
    stage = layout.coordinates(dist.get_rank()).pp
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 100 * stage, force_reset_rng=True)
    _layout = layout


def destroy() -> None:
    """Forget Megatron's groups, so that ``initialize`` may be called again."""
    global _layout
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    _layout = None


def layout() -> ParallelLayout:
    """The layout that this process was initialised with.

    Raises:
        ValueError: before ``initialize``.
    """
    if _layout is None:
        raise ValueError("call runtime.parallel.initialize(layout, seed) first")
    return _layout


def coordinates() -> Coordinates:
    """This process's tensor, data and pipeline parallel ranks."""
    return layout().coordinates(dist.get_rank())


def tensor_group() -> dist.ProcessGroup:
    """The ranks that hold the parts of the same tensors."""
    from megatron.core import parallel_state

    return _one_group(parallel_state.get_tensor_model_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    """The ranks of the same tensor and data parallel place, over all stages."""
    from megatron.core import parallel_state

    return _one_group(parallel_state.get_pipeline_model_parallel_group())


def _one_group(group: Any) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), group
    return group
