"""Experts whose projections have biases (GPT-OSS)."""

from functools import cache
from typing import Any

from megatron.core.parallel_state import (
    get_expert_tensor_parallel_rank,
    get_expert_tensor_parallel_world_size,
)
from torch import Tensor


@cache
def with_output_bias(linear: Any) -> type:
    """An expert's second projection, right for megatron-core's MLP.

    The MLP adds this projection's bias on every expert-tensor-parallel rank and the ranks' results
    are summed, so each contributes its share of the bias; and it adds in place.
    """

    class ExpertOutput(linear):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._ranks = get_expert_tensor_parallel_world_size() or 1
            # Each rank has its bias's whole gradient, and other ranks may have other experts.
            self.bias.sequence_parallel = False
            # Without this mark Megatron counts it in norms on tensor-parallel rank 0 alone.
            self.bias.tensor_model_parallel = get_expert_tensor_parallel_rank() == 0

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            output, bias = super().forward(x)
            return output.clone(), _share(bias, self._ranks)

    ExpertOutput.__name__ = ExpertOutput.__qualname__ = f"ExpertOutput{linear.__name__}"
    return ExpertOutput


def _share(bias: Tensor, ranks: int) -> Tensor:
    """The bias divided by the ranks, whose gradient is nevertheless that of the whole bias."""
    if ranks == 1:
        return bias
    return bias.detach() / ranks + (bias - bias.detach())
