"""Drawing one token per row by inverse CDF: one uniform number per token, one pass over V."""

from __future__ import annotations

import numpy as np
import torch


def uniforms(seed: int, count: int) -> torch.Tensor:
    """`count` numbers in [0, 1), float32, a function of `seed` alone."""
    bits = np.random.Generator(np.random.Philox(key=seed % (1 << 64)))
    return torch.from_numpy(bits.random(count, dtype=np.float32))


@torch.inference_mode()
def draw(
    logits_BV: torch.Tensor,
    uniform_B: torch.Tensor,
    temperature_B: torch.Tensor,
    top_p_B: torch.Tensor,
    top_k_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row and its log-probability, [B] each.

    `temperature` 0 takes the largest logit. The log-probability is of the temperature-scaled
    distribution over all of V (greedy: of temperature 1), before top-p and top-k cut it, as
    SGLang returns it. `top_k` is at least 1. `logits_BV` is overwritten.

    Raises:
        FloatingPointError: logits that are not finite, as weights with NaN or infinity make them.
    """
    greedy_B = temperature_B == 0
    if bool(greedy_B.all()):
        token_B, total_B = logits_BV.argmax(-1), logits_BV.logsumexp(-1)
        _require_finite(total_B)
        return token_B, _pick(logits_BV, token_B) - total_B
    best_B = logits_BV.argmax(-1) if bool(greedy_B.any()) else None
    if not bool((temperature_B == 1).all()):
        logits_BV.div_(torch.where(greedy_B, 1.0, temperature_B)[:, None])
    logits_BV.sub_(logits_BV.amax(-1, keepdim=True))
    mass_BV = logits_BV.exp()
    total_B = mass_BV.sum(-1)
    _require_finite(total_B)
    _cut(mass_BV, top_p_B, top_k_B)
    token_B = _invert(mass_BV, uniform_B)
    if best_B is not None:
        token_B = torch.where(greedy_B, best_B, token_B)
    return token_B, _pick(logits_BV, token_B) - total_B.log()


def _require_finite(total_B: torch.Tensor) -> None:
    """Of each row's sum over V, in which NaN and infinity stay."""
    if not bool(total_B.isfinite().all()):
        wrong = int((~total_B.isfinite()).sum())
        raise FloatingPointError(
            f"the logits of {wrong} of {len(total_B)} rows are not finite: the weights hold NaN or "
            "infinity, or overflow in this type"
        )


def _pick(values_BV: torch.Tensor, token_B: torch.Tensor) -> torch.Tensor:
    return values_BV.gather(1, token_B[:, None]).squeeze(1)


def _invert(mass_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative mass exceeds uniform x total; never one of mass zero."""
    cumulative_BV = mass_BV.cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    below_B1 = torch.nextafter(total_B1, torch.zeros(()))
    target_B1 = torch.minimum(uniform_B[:, None] * total_B1, below_B1)
    return torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(1)


def _cut(mass_BV: torch.Tensor, top_p_B: torch.Tensor, top_k_B: torch.Tensor) -> None:
    """Zero the mass outside each row's top-p and top-k, in place, in the rows that have either."""
    vocab = mass_BV.shape[1]
    rows = ((top_p_B < 1) | (top_k_B < vocab)).nonzero().squeeze(1)
    if not len(rows):
        return
    ordered, order = mass_BV[rows].sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    drop = before > top_p_B[rows, None] * ordered.sum(-1, keepdim=True)
    drop |= torch.arange(vocab) >= top_k_B[rows, None]
    mass_BV[rows] = torch.zeros_like(ordered).scatter_(1, order, ordered.masked_fill(drop, 0.0))
