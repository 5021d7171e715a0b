"""Policy losses that compare the policies on whole responses.

Every token of a response gets the response's loss, so that ``sequence_mean_token_mean`` is the
papers' mean over responses.
"""

from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.losses.base import (
    TokenInputs,
    TokenLoss,
    entropy_estimate,
    of_sequences,
    with_slope,
)
from hybridflow.algorithms.losses.clipped import clipped_surrogate


class _Through(torch.autograd.Function):
    """The same values; tokens that are cut get no gradient."""

    @staticmethod
    def forward(ctx: Any, logprobs_T: Tensor, cut_T: Tensor) -> Tensor:
        ctx.save_for_backward(cut_T)
        return logprobs_T.view_as(logprobs_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_T,), (cut_T,) = grads, ctx.saved_tensors
        return grad_T * (1 - cut_T), None


def gspo(inputs: TokenInputs) -> TokenLoss:
    """PPO's surrogate on the ratio of the whole response.

    GSPO (Zheng et al., 2025, arXiv:2507.18071), equations 5 and 7::

        s_i  = exp(mean over t of (logp_t - old_logp_t)),  the response's ratio per token
        loss = -min(s_i * A_i, clip(s_i, 1 - low, 1 + high) * A_i)

    The paper's bounds are narrow: low 3e-4, high 4e-4. Metrics: ``ratio_mean`` of s,
    ``clip_fraction``, ``entropy_estimate``.
    """
    sequences = inputs.told_sequences()
    ratio_S = torch.exp(sequences.means(inputs.logprobs_T.detach() - inputs.old_logprobs_T))
    advantages_S = sequences.firsts(inputs.told_advantages())
    loss_S, slope_S, cut_S = clipped_surrogate(
        ratio_S, advantages_S, inputs.clip_low, inputs.clip_high
    )
    metrics_T = {
        "ratio_mean": sequences.spread(ratio_S),
        "clip_fraction": sequences.spread(cut_S),
        "entropy_estimate": entropy_estimate(inputs),
    }
    loss_T = of_sequences(inputs.logprobs_T, loss_S, slope_S, sequences)
    return TokenLoss(loss_T, metrics_T)


def gspo_token(inputs: TokenInputs) -> TokenLoss:
    """GSPO for advantages that differ by token.

    GSPO (arXiv:2507.18071), equations 13 and 14: the value of the ratio is the response's, the
    gradient each token's own::

        s_it = stop_gradient(s_i) * exp(logp_t - stop_gradient(logp_t))
        loss = -min(s_it * A_t, clip(s_it, 1 - low, 1 + high) * A_t)

    With one advantage a response, loss and gradient are ``gspo``'s. Metrics: the same.
    """
    sequences = inputs.told_sequences()
    gap_T = inputs.logprobs_T.detach() - inputs.old_logprobs_T
    ratio_T = sequences.spread(torch.exp(sequences.means(gap_T)))
    loss_T, slope_T, cut_T = clipped_surrogate(
        ratio_T, inputs.told_advantages(), inputs.clip_low, inputs.clip_high
    )
    metrics_T = {
        "ratio_mean": ratio_T,
        "clip_fraction": cut_T,
        "entropy_estimate": entropy_estimate(inputs),
    }
    return TokenLoss(with_slope(inputs.logprobs_T, loss_T, slope_T), metrics_T)


def gmpo(inputs: TokenInputs) -> TokenLoss:
    """The geometric mean of a response's bounded token ratios, times its advantage.

    GMPO (Zhao et al., 2025, arXiv:2507.20673), section 3, bounds token by token in logarithms::

        d_t  = logp_t - old_logp_t,  b_t = clip(d_t, -low, high)
        g_t  = min(d_t, b_t) where A_i > 0, max(d_t, b_t) where A_i < 0
        loss = -A_i * exp(mean over t of g_t)

    The paper's bounds are wide: low 0.4, high 0.4, which keeps ratios in [e^-0.4, e^0.4].
    Metrics: ``ratio_mean`` of the geometric means; ``clip_fraction``, the share of tokens at which
    the bound cut the gradient; ``entropy_estimate``.
    """
    sequences, advantages_T = inputs.told_sequences(), inputs.told_advantages()
    gap_T = inputs.logprobs_T.detach() - inputs.old_logprobs_T
    beyond_T = gap_T.clamp(-inputs.clip_low, inputs.clip_high).sub_(gap_T)
    # The bound is the lesser objective where it goes against the advantage.
    cut_T = (beyond_T * advantages_T).lt_(0)
    ratio_S = torch.exp(sequences.means(gap_T.addcmul_(beyond_T, cut_T)))
    loss_S = sequences.firsts(advantages_T).neg() * ratio_S
    metrics_T = {
        "ratio_mean": sequences.spread(ratio_S),
        "clip_fraction": cut_T,
        "entropy_estimate": entropy_estimate(inputs),
    }
    # The derivative of each response's loss by its mean gap is the loss; cut tokens have none.
    free_T = _Through.apply(inputs.logprobs_T, cut_T)
    return TokenLoss(of_sequences(free_T, loss_S, loss_S, sequences), metrics_T)
