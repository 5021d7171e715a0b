"""A tensor that several ranks read, each for a part of the result."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_gradient(tensor: Tensor, group: Any) -> Tensor:
    """The same tensor, whose gradient is the sum over the group's ranks.

    Megatron's ``copy_to_tensor_model_parallel_region`` does so for contiguous gradients alone: of
    others it sums a copy and returns the part.
    """
    return tensor if group.size() == 1 else _SumGradient.apply(tensor, group)  # type: ignore[return-value]
