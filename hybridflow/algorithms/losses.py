"""Losses of one sampled token; how tokens are averaged is aggregation's matter."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLoss:
    """A loss of every token and what is worth a metric.

    Attributes:
        loss_T: ``[T]``, differentiable.
        metrics_T: name -> ``[T]`` detached values, whose token means are reported.
    """

    loss_T: Tensor
    metrics_T: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenInputs:
    """What a loss may read, all ``[T]``, in nats; old_logprobs_T and advantages_T carry no grad."""

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor | None
    clip_low: float = 0.2
    clip_high: float = 0.2


@dataclass(frozen=True)
class Loss:
    """An entry of the registry of losses.

    Attributes:
        needs_advantages: whether the batch must hold ``advantages``.
        metrics: names of its metrics.
    """

    function: Callable[[TokenInputs], TokenLoss]
    needs_advantages: bool
    metrics: tuple[str, ...] = ()

    def __call__(self, inputs: TokenInputs) -> TokenLoss:
        assert not self.needs_advantages or inputs.advantages_T is not None
        return self.function(inputs)


def ppo_clip(inputs: TokenInputs) -> TokenLoss:
    """Clipped surrogate objective.

    PPO (Schulman et al., 2017, arXiv:1707.06347), equation 7, with DAPO's asymmetric bounds
    (Yu et al., 2025, arXiv:2503.14476, "clip-higher")::

        loss = -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A),  ratio = exp(logp - old_logp)

    Metrics: ``ratio_mean``; ``clip_fraction``, the share of tokens at which the bound cut the
    gradient; ``entropy_estimate``, -logp, whose mean is the policy's entropy while sampling is
    on-policy.
    """
    assert inputs.advantages_T is not None, "Loss checks this"
    ratio_T = torch.exp(inputs.logprobs_T - inputs.old_logprobs_T)
    clipped_T = ratio_T.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    free_T, bounded_T = ratio_T * inputs.advantages_T, clipped_T * inputs.advantages_T
    metrics_T = {
        "ratio_mean": ratio_T.detach(),
        "clip_fraction": (bounded_T < free_T).detach().float(),
        "entropy_estimate": -inputs.logprobs_T.detach(),
    }
    return TokenLoss(-torch.minimum(free_T, bounded_T), metrics_T)


def cross_entropy(inputs: TokenInputs) -> TokenLoss:
    """Negative log-likelihood of the response: supervised fine-tuning, ``loss = -logp``."""
    return TokenLoss(-inputs.logprobs_T)


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(
        ppo_clip,
        needs_advantages=True,
        metrics=("ratio_mean", "clip_fraction", "entropy_estimate"),
    ),
    "cross_entropy": Loss(cross_entropy, needs_advantages=False),
}
