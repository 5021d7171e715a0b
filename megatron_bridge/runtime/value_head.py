"""The last layer of a reward model or critic: scores per token instead of a vocabulary."""

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_bridge.runtime import device

FIRST_SCORES = 0.01
"""Standard deviation of a new head's scores of normalised hidden states."""


class ValueHead(torch.nn.Module):
    """A linear layer, the same on all ranks; scores are float32 in any dtype.

    Takes the place of GPTModel's output layer, and its arguments. A new head is a function of the
    seed alone, and so small that its first scores stay within some hundredths: a critic that
    says nothing yet. (Zeros would give the layers below no gradient in the first step.) A bias is
    there for heads that were trained with one, and begins at 0.
    """

    def __init__(self, config: Any, labels: int, seed: int, bias: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        generator = torch.Generator().manual_seed(seed)
        spread = FIRST_SCORES / config.hidden_size**0.5
        weight = torch.randn(labels, config.hidden_size, generator=generator) * spread
        self.weight = torch.nn.Parameter(weight.to(config.params_dtype).to(device.device()))
        zeros = torch.zeros(labels, dtype=config.params_dtype, device=device.device())
        self.bias = torch.nn.Parameter(zeros) if bias else None

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
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), bias), None
