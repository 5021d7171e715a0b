"""Policy losses that compare the policies on whole responses.

Every token of a response gets the response's loss, so that ``sequence_mean_token_mean`` is the
papers' mean over responses.
"""

import torch
from torch import Tensor

from hybridflow.algorithms.losses.base import (
    TokenInputs,
    TokenLoss,
    add_sums,
    entropy_estimate,
    of_sequences,
    ratio_of,
    with_slope,
)
from hybridflow.algorithms.losses.clipped import clip_sums, clipped_surrogate
from hybridflow.ragged import RUN


def gspo(inputs: TokenInputs) -> TokenLoss:
    """PPO's surrogate on the ratio of the whole response.

    GSPO (Zheng et al., 2025, arXiv:2507.18071), equations 5 and 7::

        s_i  = exp(mean over t of (logp_t - old_logp_t)),  the response's ratio per token
        loss = -min(s_i * A_i, clip(s_i, 1 - low, 1 + high) * A_i)

    The paper's bounds are narrow: low 3e-4, high 4e-4. Metrics: ``ratio_mean`` of s and the others
    of ``ppo_clip``.
    """
    sequences = inputs.told_sequences()
    ratio_S = ratio_of(sequences.means(inputs.logprobs_T.detach() - inputs.old_logprobs_T))
    advantages_S = sequences.firsts(inputs.told_advantages())
    loss_S, slope_S, cut_S = clipped_surrogate(
        ratio_S, advantages_S, inputs.clip_low, inputs.clip_high
    )
    loss_T = of_sequences(inputs.logprobs_T, sequences.spread(loss_S), slope_S, sequences)
    tokens_S = sequences.lengths_S
    sums = {"ratio_mean": (ratio_S * tokens_S).sum(), **clip_sums(cut_S * tokens_S, ratio_S, 1.0)}
    return TokenLoss(loss_T, {**sums, **entropy_estimate(inputs)})


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
    ratio_T = sequences.spread(ratio_of(sequences.means(gap_T)))
    loss_T, slope_T, cut_T = clipped_surrogate(
        ratio_T, inputs.told_advantages(), inputs.clip_low, inputs.clip_high
    )
    sums = {"ratio_mean": ratio_T.sum(), **clip_sums(cut_T, ratio_T, 1.0)}
    sums |= entropy_estimate(inputs)
    return TokenLoss(with_slope(inputs.logprobs_T, loss_T, slope_T), sums)


def gmpo(inputs: TokenInputs) -> TokenLoss:
    """The geometric mean of a response's bounded token ratios, times its advantage.

    GMPO (Zhao et al., 2025, arXiv:2507.20673), section 3, bounds token by token in logarithms::

        d_t  = logp_t - old_logp_t,  b_t = clip(d_t, -low, high)
        g_t  = min(d_t, b_t) where A_i > 0, max(d_t, b_t) where A_i < 0
        loss = -A_i * exp(mean over t of g_t)

    The paper's bounds are wide: low 0.4, high 0.4, which keeps ratios in [e^-0.4, e^0.4].
    Metrics: ``ratio_mean`` of the geometric means; the clip fractions, as ``ppo_clip``'s, which
    count tokens; ``entropy_estimate``.
    """
    sequences, advantages_T = inputs.told_sequences(), inputs.told_advantages()
    bounded_T = torch.empty_like(inputs.logprobs_T, requires_grad=False)
    free_T = torch.empty_like(bounded_T)
    sums: dict[str, Tensor] = {}
    for start in range(0, len(free_T), RUN):
        span = slice(start, start + RUN)
        gap_t = inputs.logprobs_T.detach()[span] - inputs.old_logprobs_T[span]
        beyond_t = gap_t.clamp(-inputs.clip_low, inputs.clip_high).sub_(gap_t)
        # The bound is the lesser objective where it goes against the advantage.
        cut_t = (beyond_t * advantages_T[span]).lt_(0)
        add_sums(sums, clip_sums(cut_t, gap_t, 0.0))
        free_T[span] = 1 - cut_t
        bounded_T[span] = gap_t.addcmul_(beyond_t, cut_t)
    ratio_S = ratio_of(sequences.means(bounded_T))
    loss_S = sequences.firsts(advantages_T).neg() * ratio_S
    loss_T = torch.index_select(loss_S, 0, sequences.index_T, out=bounded_T)
    mean = {"ratio_mean": (ratio_S * sequences.lengths_S).sum()}
    # The derivative of each response's loss by its mean gap is the loss.
    return TokenLoss(
        of_sequences(inputs.logprobs_T, loss_T, loss_S, sequences, free_T),
        {**mean, **sums, **entropy_estimate(inputs)},
    )
