"""Patches that let megatron-core's experts and latent attention run on the CPU over gloo.

Two of them serve a GPU without transformer-engine as well.
"""

from types import ModuleType
from typing import Any

import torch

from megatron_bridge.runtime.patch import Patch


def _no_router_gemm(module: ModuleType) -> None:
    module.te_general_gemm = None  # type: ignore[attr-defined]


def _no_engine_in_latent_attention(module: ModuleType) -> None:
    module.HAVE_TE = False  # type: ignore[attr-defined]


def _splits_as_numbers(module: ModuleType) -> None:
    """Counts of tokens are on the CPU already; only their form changes."""

    def convert(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        del record_stream
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = convert  # type: ignore[attr-defined]


def _uneven_gather(module: ModuleType) -> None:
    stock = module._gather_along_first_dim

    def gather(
        tensor: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return stock(tensor, group, sizes, use_global_buffer)
        if max(sizes) == 0:
            return tensor
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    module._gather_along_first_dim = gather  # type: ignore[attr-defined]


def _uneven_scatter(module: ModuleType) -> None:
    stock = module._reduce_scatter_along_first_dim

    def scatter(
        tensor: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return stock(tensor, group, sizes, use_global_buffer)
        total = tensor.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(list(sizes))[group.rank()].clone()

    module._reduce_scatter_along_first_dim = scatter  # type: ignore[attr-defined]


# Needed wherever transformer-engine is missing, on a GPU too.
WITHOUT_ENGINE: tuple[Patch, ...] = (
    Patch(
        name="router_gemm",
        module="megatron.core.transformer.moe.moe_utils",
        target="RouterGatingLinearFunction",
        needles=("te_general_gemm is not None",),
        apply=_no_router_gemm,
        why="the name is defined only with transformer-engine, and asked for without it",
    ),
    Patch(
        name="latent_attention",
        module="megatron.core.transformer.multi_latent_attention",
        target="MultiLatentAttention",
        needles=("HAVE_TE\n            and isinstance(self.linear_proj, TELinear)",),
        apply=_no_engine_in_latent_attention,
        why="the module takes transformer-engine for installed, and its classes for types",
    ),
)
PATCHES: tuple[Patch, ...] = (
    *WITHOUT_ENGINE,
    Patch(
        name="splits",
        module="megatron.core.transformer.moe.token_dispatcher",
        target="maybe_move_tensor_to_cpu",
        needles=("tensor.is_cuda", "as_numpy: bool = False", "record_stream: bool = False"),
        apply=_splits_as_numbers,
        why="gloo's all_to_all takes numbers; only tensors that come from a GPU become such",
    ),
    Patch(
        name="uneven_gather",
        module="megatron.core.tensor_parallel.mappings",
        target="_gather_along_first_dim",
        needles=("output_split_sizes is None", "torch.distributed.all_gather(output_tensor_list"),
        apply=_uneven_gather,
        why="gloo gathers only tensors of one size",
    ),
    Patch(
        name="uneven_scatter",
        module="megatron.core.tensor_parallel.mappings",
        target="_reduce_scatter_along_first_dim",
        needles=("input_split_sizes is None", "torch.distributed.reduce_scatter("),
        apply=_uneven_scatter,
        why="gloo scatters only tensors of one size",
    ),
)


def install_without_engine() -> None:
    """Make experts and latent attention usable without transformer-engine.

    Raises:
        RuntimeError: when a patch does not fit the installed megatron-core.
    """
    for patch in WITHOUT_ENGINE:
        problem = patch.problem()
        if problem is not None:
            raise RuntimeError(
                "megatron-core differs from the 0.16 that the bridge serves; install megatron-core "
                f"0.16.x: {patch.name}: {problem}"
            )
        patch.install()
