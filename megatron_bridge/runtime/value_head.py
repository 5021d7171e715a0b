"""The last layer of a reward model or critic: scores per token instead of a vocabulary."""

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_bridge.runtime import device


class ValueHead(torch.nn.Module):
    """A linear layer without bias, the same on all tensor-parallel ranks.

    Takes the place of GPTModel's output layer, and its arguments.
    """

    def __init__(self, config: Any, labels: int) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        weight = torch.empty(
            labels, config.hidden_size, dtype=config.params_dtype, device=device.device()
        )
        config.init_method(weight)
        self.weight = torch.nn.Parameter(weight)

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None
    ) -> tuple[Tensor, None]:
        """hidden [T, B, hidden] (this rank's part under sequence parallelism) -> [T, B, labels]."""
        del weight, runtime_gather_output
        if self.sequence_parallel:
            # Every rank computes the whole gradient of the gathered sequence.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False
            )
        return torch.nn.functional.linear(hidden, self.weight), None
