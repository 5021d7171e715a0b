"""RMSNorm for layers without transformer-engine, and over all heads of a layer at once."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from torch import Tensor

from megatron_bridge.runtime import device
from megatron_bridge.runtime.module_groups import replicas, tensor_ranks


class _RmsNorm(torch.autograd.Function):
    """(weight + offset) * x / sqrt(mean(x^2) + eps), in float32 inside.

    On the CPU torch's own is a chain of small operations; written as one function with its
    gradient it takes half the time. The last dimension may be cut over a group of ranks: sums
    over it are then added up.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, group: Any
    ) -> Tensor:
        wide = x.float()
        size = x.shape[-1] * (1 if group is None else group.size())
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = _sum(scale, group).mul_(1 / size).add_(eps).rsqrt_()
        normal = wide * scale
        ctx.save_for_backward(normal, scale, weight)
        ctx.rest = size, offset, group
        if offset:
            return (normal * (weight.float() + offset)).to(x.dtype)
        return normal.to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        normal, scale, weight = ctx.saved_tensors
        size, offset, group = ctx.rest
        wide = gradient.float()
        weight_gradient = (wide * normal).flatten(0, -2).sum(0).to(weight.dtype)
        inner = wide * (weight.float() + offset if offset else weight.float())
        along = _sum((inner * normal).sum(-1, keepdim=True), group).mul_(1 / size)
        x_gradient = inner.addcmul_(normal, along, value=-1).mul_(scale)
        return x_gradient.to(gradient.dtype), weight_gradient, None, None, None


def _sum(part: Tensor, group: Any) -> Tensor:
    """The sum over the ranks that hold parts of the dimension."""
    if group is not None and group.size() > 1:
        dist.all_reduce(part, group=group)
    return part


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, with its weight in the model's dtype.

    Megatron's own wrapper makes float32 weights whatever ``params_dtype`` says. The weight is
    replicated over tensor-parallel ranks, so it carries no ``tensor_model_parallel`` mark and
    counts once in gradient norms. With ``layernorm_zero_centered_gamma`` it is stored less one.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.offset = float(config.layernorm_zero_centered_gamma)
        self.weight = torch.nn.Parameter(_start(config, hidden_size, 1 - self.offset))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        return _RmsNorm.apply(x, self.weight, self.eps, self.offset, None)  # type: ignore[return-value]


def _start(config: Any, size: int, value: float) -> Tensor:
    return torch.full((size,), value, device=device.device(), dtype=config.params_dtype)


class _WideNorm(torch.nn.Module):
    """RMSNorm over all heads of a layer together, which tensor parallelism cuts.

    The weight is this rank's part, marked as such; the sum of squares goes over all ranks.
    """

    def __init__(self, config: Any, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps, self.group = eps, tensor_ranks()
        if heads % self.group.size():
            raise ValueError(
                f"a norm over all {heads} heads cannot be cut over tp={self.group.size()}; choose "
                f"a tp that divides {heads}"
            )
        mine = divide(heads, self.group.size()) * head_dim
        self.weight = torch.nn.Parameter(_start(config, mine, 1.0))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads of this rank, head_dim] -> the same shape and dtype."""
        out = _RmsNorm.apply(x.flatten(-2), self.weight, self.eps, 0.0, self.group)
        return out.view(x.shape)  # type: ignore[union-attr]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """The weight, cut over tensor parallelism."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=replicas(metadata),
        )


class WideQueryNorm(_WideNorm):
    """The norm of queries over all heads."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__(config, config.num_attention_heads, hidden_size, eps)


class WideKeyNorm(_WideNorm):
    """The norm of keys over all key-value heads."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__(config, config.num_query_groups, hidden_size, eps)
