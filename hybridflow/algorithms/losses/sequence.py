"""Policy losses that compare the policies on whole responses.

Every token of a response gets the response's loss, so that ``sequence_mean_token_mean`` is the
papers' mean over responses.
"""

import torch

from hybridflow.algorithms.losses.base import TokenInputs, TokenLoss, entropy_estimate
from hybridflow.algorithms.losses.clipped import clipped_surrogate


def gspo(inputs: TokenInputs) -> TokenLoss:
    """PPO's surrogate on the ratio of the whole response.

    GSPO (Zheng et al., 2025, arXiv:2507.18071), equations 5 and 7::

        s_i  = exp(mean over t of (logp_t - old_logp_t)),  the response's ratio per token
        loss = -min(s_i * A_i, clip(s_i, 1 - low, 1 + high) * A_i)

    The paper's bounds are narrow: low 3e-4, high 4e-4. Metrics: ``ratio_mean`` of s,
    ``clip_fraction``, ``entropy_estimate``.
    """
    gap_T = inputs.logprobs_T - inputs.old_logprobs_T
    ratio_T = torch.exp(inputs.told_sequences().mean(gap_T))
    return _surrogate(inputs, ratio_T)


def gspo_token(inputs: TokenInputs) -> TokenLoss:
    """GSPO for advantages that differ by token.

    GSPO (arXiv:2507.18071), equations 13 and 14: the value of the ratio is the response's, the
    gradient each token's own::

        s_it = stop_gradient(s_i) * exp(logp_t - stop_gradient(logp_t))
        loss = -min(s_it * A_t, clip(s_it, 1 - low, 1 + high) * A_t)

    With one advantage a response, loss and gradient are ``gspo``'s. Metrics: the same.
    """
    gap_T = (inputs.logprobs_T - inputs.old_logprobs_T).detach()
    own_T = inputs.logprobs_T - inputs.logprobs_T.detach()
    return _surrogate(inputs, torch.exp(inputs.told_sequences().mean(gap_T) + own_T))


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
    advantages_T = inputs.told_advantages()
    gap_T = inputs.logprobs_T - inputs.old_logprobs_T
    bounded_T = gap_T.clamp(-inputs.clip_low, inputs.clip_high)
    cut_T = torch.where(advantages_T > 0, bounded_T < gap_T, bounded_T > gap_T)
    ratio_T = torch.exp(inputs.told_sequences().mean(torch.where(cut_T, bounded_T, gap_T)))
    metrics_T = {
        "ratio_mean": ratio_T.detach(),
        "clip_fraction": cut_T.float(),
        "entropy_estimate": entropy_estimate(inputs),
    }
    return TokenLoss(-advantages_T * ratio_T, metrics_T)


def _surrogate(inputs: TokenInputs, ratio_T: torch.Tensor) -> TokenLoss:
    loss_T, cut_T = clipped_surrogate(
        ratio_T, inputs.told_advantages(), inputs.clip_low, inputs.clip_high
    )
    metrics_T = {
        "ratio_mean": ratio_T.detach(),
        "clip_fraction": cut_T,
        "entropy_estimate": entropy_estimate(inputs),
    }
    return TokenLoss(loss_T, metrics_T)
