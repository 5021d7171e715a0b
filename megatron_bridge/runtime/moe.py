"""Megatron's mixture-of-experts layer, exact at every layout and choice of experts."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_bridge.runtime.features import features
from megatron_bridge.runtime.sum_gradient import sum_gradient

# A layer hands its process groups to Megatron's own classes alone; ours asks for the same ones.
logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(
    lambda record: "Unknown MLP type" not in record.getMessage()
)
_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class GroupLimit:
    """Top experts of the top groups, where the best ``experts`` of a group rank it.

    Megatron always sums topk divided by the number of chosen groups. Its router lets one object
    decide over the choice, made for replaying an earlier one; this takes that place.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: Any, group_topk: int | None, default: Any
    ) -> tuple[Tensor, Tensor]:
        """scores [T, E] -> values and indices [T, topk] of the chosen experts."""
        if not group_topk:
            return default(scores, topk)
        grouped = scores.view(len(scores), groups, -1)
        rank = grouped.topk(self.experts, dim=-1).values.sum(-1)
        chosen = rank.topk(group_topk, dim=-1).indices
        closed = torch.ones_like(rank, dtype=torch.bool).scatter(1, chosen, value=False)
        open_ = grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)
        return open_.topk(topk, dim=-1)


class Router(TopKRouter):
    """Megatron's router, whose weight is trained alike whether or not its tokens are split.

    The balancing bias stays float32 when the model is cast.
    """

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        experts = features(config).router_group_experts
        if experts is not None and config.moe_router_fusion:
            raise ValueError(
                "moe_router_fusion ranks groups in its own way, which this model does not share; "
                "set moe_router_fusion to false"
            )
        if experts is not None:
            self.router_replay: Any = GroupLimit(experts)
        self._split = self.tp_group.size() > 1 and not config.sequence_parallel

    def gating(self, input: Tensor) -> Tensor:
        """tokens [..., hidden] -> logits [..., experts] in the routing dtype."""
        weight, bias = self.weight, self.bias
        if self._split:  # each rank routes its share of the tokens: gradients are summed
            weight = sum_gradient(weight, self.tp_group)
            bias = None if bias is None else sum_gradient(bias, self.tp_group)
        dtype = _ROUTER_DTYPES.get(self.config.moe_router_dtype or "", input.dtype)
        return router_gating_linear(input, weight, bias, dtype)  # type: ignore[arg-type]

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count tokens per expert for the bias's update. Megatron's own is torch-compiled."""
        if self.expert_bias is None or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            if padding_mask is not None:
                routing_map = routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += routing_map.sum(dim=0)  # type: ignore[operator]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Moves and casts; the bias is only moved, for a rounded one chooses other experts."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            assert self.expert_bias is not None
            self.expert_bias = bias.to(self.expert_bias.device)
        return self


class MoELayer(moe_layer.MoELayer):
    """Megatron's layer, which also trains with tensor parallelism without sequence parallelism.

    Without sequence parallelism every tensor-parallel rank holds all tokens, and Megatron would
    send each of them to its experts once per rank. Here a rank sends its own share: the layer is
    sequence parallel inside, whatever the length of the pack.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # Megatron reduces experts' gradients over their own replicas only where experts are spread
        # over ranks; an expert cut in another way than the other layers has other replicas too.
        if config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
            for parameter in self.experts.parameters():  # type: ignore[union-attr]
                parameter.allreduce = False  # type: ignore[attr-defined]

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [T, B, hidden] -> the same shape, and no bias."""
        if self.config.sequence_parallel or self.attn_tp_group.size() == 1:
            whole: Any = super().forward(hidden_states, intermediate_tensors, padding_mask)
            return whole
        assert intermediate_tensors is None and padding_mask is None
        if self.moe_layer_recompute:
            shares: Any = tensor_parallel.checkpoint(self._forward_shares, False, hidden_states)
            return shares
        return self._forward_shares(hidden_states)

    def _forward_shares(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        shared = self.shared_experts_compute(hidden_states)
        tokens, padding = self._share(hidden_states)
        probabilities, routing_map = self.route(tokens, padding)
        tokens, probabilities = self.preprocess(tokens, probabilities, routing_map)
        tokens, probabilities = self.dispatch(tokens, probabilities)
        output, _ = self.routed_experts_compute(tokens, probabilities)
        output = self.postprocess(self.combine(output), None)
        whole = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False)
        whole = whole[: len(hidden_states)]
        return (whole if shared is None else whole + shared), None

    def _share(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """This rank's share of the tokens, and which of them only fill it up (None: none)."""
        size, rank = self.attn_tp_group.size(), self.attn_tp_group.rank()
        length, batch, _ = hidden_states.shape
        missing = -length % size
        if not missing:
            return scatter_to_sequence_parallel_region(hidden_states), None
        filled = torch.nn.functional.pad(hidden_states, (0, 0, 0, 0, 0, missing))
        place = torch.arange(len(filled), device=filled.device).chunk(size)[rank]
        padding = (place >= length)[:, None].expand(-1, batch)
        return scatter_to_sequence_parallel_region(filled), padding
