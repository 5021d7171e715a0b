"""This process among the ranks of a model."""

from megatron.core import parallel_state

from hybridflow.megatron.config import EngineConfig
from megatron_bridge.runtime import device, parallel


def join(config: EngineConfig) -> None:
    """Megatron's process groups for this layout; engines of one process share them.

    Raises:
        ValueError: another engine of this process has a different layout.
    """
    device.prepare()
    if not parallel_state.is_initialized():
        parallel.initialize(config.layout, config.seed)
    elif parallel.layout() != config.layout:
        raise ValueError(
            f"roles that share processes need one layout: {parallel.layout()} is up, "
            f"{config.layout} was asked for; give both roles the same `parallel`"
        )


def is_reporter() -> bool:
    """Whether this rank holds the results of its data-parallel replica."""
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return last and parallel_state.get_tensor_model_parallel_rank() == 0
