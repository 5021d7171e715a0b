"""Causal attention of rows of one length: sliding windows, sinks, values of another size."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """How a layer's attention differs from plain causal attention.

    Attributes:
        window: how many tokens a query sees, itself included; None: all before it.
        sinks: [H] a logit per head that takes part in the softmax and has no value; None: no such.
    """

    window: int | None = None
    sinks: Tensor | None = None


class Masks:
    """Boolean masks (True: seen) by length and form; all layers of one form share them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int | None, bool], Tensor] = {}

    def of(self, form: Form, length: int, device: torch.device) -> Tensor | None:
        """[L, L], with a column more in front for a sink; None: the plain causal mask serves."""
        window = form.window if form.window is not None and form.window < length else None
        sink = form.sinks is not None
        if window is None and not sink:
            return None
        key = (length, window, sink)
        if key not in self._known:
            self._known[key] = _mask(length, window, sink, device)
        return self._known[key]


def _mask(length: int, window: int | None, sink: bool, device: torch.device) -> Tensor:
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    return F.pad(seen, (1, 0), value=True) if sink else seen


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, form: Form, masks: Masks) -> Tensor:
    """Causal attention of whole rows.

    Args:
        q: [B, H, L, D]; k: [B, K, L, D]; v: [B, K, L, V] with V at most D.

    Returns:
        [B, H, L, V]
    """
    length, value_dim = q.shape[-2], v.shape[-1]
    mask = masks.of(form, length, q.device)
    if form.sinks is not None:
        q, k, v = _with_sinks(q, k, v, form.sinks, scale)
    if v.shape[-1] != q.shape[-1]:
        # The quick kernel wants one head size; the others' columns are zeros and are dropped.
        v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out if out.shape[-1] == value_dim else out[..., :value_dim]


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gives every query one more key, in front, whose logit is its head's sink and value is zero.

    One more column of the head carries it: the sink (over the scale) in the queries, one in that
    key and zero in the others. So the quick kernel and its gradient serve.
    """
    column = (sinks_H / scale).to(q.dtype)[:, None, None].expand(*q.shape[:-1], 1)
    key = k.new_zeros(*k.shape[:2], 1, k.shape[-1] + 1)
    key[..., -1] = 1
    return (
        torch.cat([q, column], -1),
        torch.cat([key, F.pad(k, (0, 1))], -2),
        F.pad(v, (0, 0, 1, 0)),
    )
