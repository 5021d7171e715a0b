"""RMSNorm for layers without transformer-engine."""

from typing import Any

import torch

from megatron_bridge.runtime import device


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm in the model's dtype.

    Megatron's own wrapper makes float32 weights whatever ``params_dtype`` says. The weight is
    replicated over tensor-parallel ranks, so it carries no ``tensor_model_parallel`` mark and
    counts once in gradient norms.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=device.device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
