"""The process groups that a module of ours asks Megatron for."""

from typing import Any

from megatron.core.parallel_state import get_data_parallel_group, get_tensor_model_parallel_group


def tensor_ranks(groups: Any = None) -> Any:
    """The tensor-parallel group of a module: the one that it was given, or Megatron's own."""
    given = getattr(groups, "tp", None)
    return get_tensor_model_parallel_group() if given is None else given


def replicas(metadata: dict[str, Any] | None) -> Any:
    """The ranks that hold the same part of a tensor, as a checkpoint's ``metadata`` says."""
    known = (metadata or {}).get("dp_cp_group")
    return get_data_parallel_group(with_context_parallel=True) if known is None else known
