"""Multi-head latent attention (DeepSeek's MLA), exact at every tensor-parallel size."""

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megatron_bridge.runtime.features import features
from megatron_bridge.runtime.sum_gradient import sum_gradient

# The replicated linear layer that Megatron offers besides transformer-engine's.
from megatron.core.post_training.modelopt.layers import Linear as ReplicatedLinear  # isort: skip

__all__ = ["LatentAttention", "ReplicatedLinear"]


class LatentAttention(MLASelfAttention):
    """Megatron's MLA with the gradients of one rank at any tensor-parallel size."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        self._start_replicated()
        self._set_epsilon()
        if self.pg_collection.tp.size() > 1 and not config.sequence_parallel:
            self._sum_partial_gradients()

    def _start_replicated(self) -> None:
        """Megatron's replicated linear layer starts as torch's does; start as the others do."""
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            linear = getattr(self, name, None)
            if isinstance(linear, ReplicatedLinear) and self.config.perform_initialization:
                with torch.no_grad():
                    self.config.init_method(linear.weight)  # type: ignore[misc]

    def _set_epsilon(self) -> None:
        """Give the norms of the latents their own epsilon, fused into a projection or not."""
        epsilon = features(self.config).latent_norm_eps
        if epsilon is None:
            return
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            module = getattr(self, name, None)
            if hasattr(module, "eps"):
                module.eps = epsilon  # type: ignore[union-attr]

    def _sum_partial_gradients(self) -> None:
        """Where all ranks hold all tokens, sum what only some heads contribute, and that alone.

        The rotary part of the keys is shared by all heads, so each rank has the gradient of its
        own heads. The norm of the queries' latents has its whole gradient already, yet Megatron
        sums gradients of every parameter with such a name; averaging equal ones leaves them.
        """
        positions = self.config.qk_pos_emb_head_dim
        group = self.pg_collection.tp
        self.linear_kv_down_proj.register_forward_hook(partial(_share_positions, positions, group))
        norm = getattr(getattr(self, "q_layernorm", None), "weight", None)
        if norm is not None:
            norm.average_gradients_across_tp_domain = True


def _share_positions(
    positions: int, group: Any, _module: Any, _inputs: Any, outputs: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    """Mark the last ``positions`` columns as read by every rank's heads."""
    latent, shared = outputs[0].split([outputs[0].shape[-1] - positions, positions], dim=-1)
    return torch.cat([latent, sum_gradient(shared, group)], dim=-1), outputs[1]
