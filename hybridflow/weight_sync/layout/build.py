"""A server's parameters as tensors, built from whole HuggingFace tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron_bridge.regions import slices, volume
from megatron_bridge.reshard import Fill, TargetParameter


def build(
    parameter: TargetParameter, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The parameter's tensor; contiguous, of the parameter's own dtype, else of `dtype`."""
    dtype = dtype_of(parameter, dtype)
    if _is_a_tensor(parameter, weights):
        return weights[parameter.fills[0].source].to(dtype).contiguous()
    covered = sum(volume(fill.target_box) for fill in parameter.fills)
    target = torch.empty(parameter.shape, dtype=dtype)
    if covered < target.numel():
        target.zero_()
    for fill in parameter.fills:
        put(target, fill, weights[fill.source])
    return target


def put(target: torch.Tensor, fill: Fill, source: torch.Tensor) -> None:
    """Copy `fill` of the whole HuggingFace tensor `source` to its place in `target`."""
    into = target[slices(fill.target_box)]
    into.copy_(source[slices(fill.source_box)].view(into.shape))


def dtype_of(parameter: TargetParameter, dtype: torch.dtype) -> torch.dtype:
    """The parameter's dtype in a model of `dtype`."""
    return dtype if parameter.dtype is None else getattr(torch, parameter.dtype)


def parameter_bytes(parameters: Iterable[TargetParameter], dtype: torch.dtype) -> int:
    """Bytes of one rank's parameters in a model of `dtype`."""
    return sum(
        torch.Size(parameter.shape).numel() * dtype_of(parameter, dtype).itemsize
        for parameter in parameters
    )


def _is_a_tensor(parameter: TargetParameter, weights: Mapping[str, torch.Tensor]) -> bool:
    fills = parameter.fills
    return len(fills) == 1 and tuple(weights[fills[0].source].shape) == parameter.shape
