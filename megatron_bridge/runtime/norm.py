"""RMSNorm for layers without transformer-engine."""

from typing import Any

import torch
from torch import Tensor

from megatron_bridge.runtime import device


class _RmsNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps), in float32 inside.

    On the CPU torch's own is a chain of small operations; written as one function with its
    gradient it takes half the time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = scale.mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        normal = wide * scale
        ctx.save_for_backward(normal, scale, weight)
        return normal.to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        normal, scale, weight = ctx.saved_tensors
        wide = gradient.float()
        weight_gradient = (wide * normal).flatten(0, -2).sum(0).to(weight.dtype)
        inner = wide * weight.float()
        along = (inner * normal).mean(-1, keepdim=True)
        x_gradient = inner.addcmul_(normal, along, value=-1).mul_(scale)
        return x_gradient.to(gradient.dtype), weight_gradient, None


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, with its weight in the model's dtype.

    Megatron's own wrapper makes float32 weights whatever ``params_dtype`` says. The weight is
    replicated over tensor-parallel ranks, so it carries no ``tensor_model_parallel`` mark and
    counts once in gradient norms.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        ones = torch.ones(hidden_size, device=device.device(), dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(ones)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        return _RmsNorm.apply(x, self.weight, self.eps)  # type: ignore[return-value]
