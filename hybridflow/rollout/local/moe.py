"""The MLPs of a decoder's layer over the server's fused parameters: one, or a choice of experts.

Letters: N tokens, K experts per token, X experts, E hidden, M an expert's width with its padding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from hybridflow.rollout.local.geometry import Routing

Parameters = Mapping[str, torch.Tensor]
_EXPERT_MODULES = ("mlp.", "block_sparse_moe.")


def make_mlp(p: Parameters, prefix: str, routing: Routing | None) -> GatedMlp | ExpertMlp:
    """The MLP of the layer whose parameters begin with `prefix`."""
    for module in _EXPERT_MODULES:
        if f"{prefix}{module}experts.w13_weight" in p:
            assert routing is not None, f"{prefix} has experts, the config none"
            return ExpertMlp(p, prefix + module, routing)
    return GatedMlp(p, f"{prefix}mlp.")


class GatedMlp:
    """silu(gate) * up, then down; gate and up are one product."""

    def __init__(self, p: Parameters, prefix: str) -> None:
        self._gate_up = p[f"{prefix}gate_up_proj.weight"]
        self._down = p[f"{prefix}down_proj.weight"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., E] to [..., E]."""
        return _gated(x, self._gate_up, self._down)


class ExpertMlp:
    """The sum of a token's K experts by their weights, and of the shared expert where one is."""

    def __init__(self, p: Parameters, prefix: str, routing: Routing) -> None:
        self._routing = routing
        self._router = p[f"{prefix}gate.weight"]
        self._gate_up_X = p[f"{prefix}experts.w13_weight"].unbind()
        self._down_X = p[f"{prefix}experts.w2_weight"].unbind()
        self._shared = self._shared_gate = None
        if f"{prefix}shared_expert_gate.weight" in p:
            self._shared = GatedMlp(p, f"{prefix}shared_expert.")
            self._shared_gate = p[f"{prefix}shared_expert_gate.weight"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., E] to [..., E]."""
        x_NE = x.reshape(-1, x.shape[-1])
        out_NE = self._experts(x_NE, *self._choose(x_NE))
        if self._shared is not None and self._shared_gate is not None:
            gate_N1 = torch.sigmoid(F.linear(x_NE, self._shared_gate))
            out_NE = out_NE + gate_N1 * self._shared(x_NE)
        return out_NE.view(x.shape)

    def _choose(self, x_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's experts [N, K] and their weights [N, K], computed in float32."""
        scores_NX = F.linear(x_NE, self._router).softmax(-1, dtype=torch.float32)
        weight_NK, expert_NK = scores_NX.topk(self._routing.experts_per_token)
        if self._routing.normalized:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return expert_NK, weight_NK.to(x_NE.dtype)

    def _experts(
        self, x_NE: torch.Tensor, expert_NK: torch.Tensor, weight_NK: torch.Tensor
    ) -> torch.Tensor:
        """Run each chosen expert once, over its tokens together."""
        out_NE = torch.zeros_like(x_NE)
        order = expert_NK.flatten().argsort(stable=True)
        tokens = order // expert_NK.shape[1]
        weights = weight_NK.flatten()[order, None]
        counts_X = torch.bincount(expert_NK.flatten(), minlength=len(self._down_X)).tolist()
        start = 0
        for expert, count in enumerate(counts_X):
            if count:
                rows = slice(start, start + count)
                own = tokens[rows]
                y = _gated(x_NE[own], self._gate_up_X[expert], self._down_X[expert])
                out_NE.index_add_(0, own, y * weights[rows])
                start += count
        return out_NE


def _gated(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)
