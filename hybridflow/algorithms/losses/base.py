"""What a loss of sampled tokens reads and gives."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.batch import Ragged


@dataclass(frozen=True)
class Sequences:
    """Which response each of T tokens belongs to, so that a loss can look at whole responses.

    Attributes:
        index_T: ``[T]`` int64 response of each token.
        lengths_S: ``[S]`` tokens of each of the S responses, all of which are there.
    """

    index_T: Tensor
    lengths_S: Tensor

    @staticmethod
    def of(responses: Ragged) -> "Sequences":
        """Those of the rows of a batch, end to end."""
        lengths_S = responses.lengths
        return Sequences(torch.repeat_interleave(lengths_S), lengths_S)

    def mean(self, values_T: Tensor) -> Tensor:
        """``[T]`` the mean over each token's whole response, differentiable."""
        return (self._sums(values_T) / self.lengths_S.clamp(min=1))[self.index_T]

    def sum(self, values_T: Tensor) -> Tensor:
        """``[T]`` the sum over each token's whole response, differentiable."""
        return self._sums(values_T)[self.index_T]

    def counts(self, flags_T: Tensor) -> Tensor:
        """``[S]`` int64 number of flagged tokens of each response."""
        counts_S = torch.zeros_like(self.lengths_S)
        return counts_S.index_add(0, self.index_T, flags_T.to(counts_S.dtype))

    def _sums(self, values_T: Tensor) -> Tensor:
        return values_T.new_zeros(len(self.lengths_S)).index_add(0, self.index_T, values_T)


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
    """What a loss may read, all ``[T]``, in nats; old_logprobs_T and advantages_T carry no grad.

    Attributes:
        clip_low, clip_high: bounds of the policy ratio, ``[1 - low, 1 + high]``.
        dual_clip: bound of the loss of bad samples, in units of their advantage.
        tau_positive, tau_negative: temperatures of SAPO's gate.
        sequences: needed by losses that look at whole responses.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor | None
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    sequences: Sequences | None = None

    @property
    def ratio_T(self) -> Tensor:
        """``[T]`` probability of each token over its probability when it was sampled."""
        return torch.exp(self.logprobs_T - self.old_logprobs_T)

    def told_advantages(self) -> Tensor:
        """The advantages of a loss that needs them."""
        assert self.advantages_T is not None, "Loss checks this"
        return self.advantages_T

    def told_sequences(self) -> Sequences:
        """The responses of a loss that needs them."""
        assert self.sequences is not None, "the engine tells which token is whose"
        return self.sequences


@dataclass(frozen=True)
class Loss:
    """An entry of the registry of losses.

    Attributes:
        needs_advantages: whether the batch must hold ``advantages``.
        metrics: names of its metrics.
        compares_policies: whether it reads ``old_logprobs``.
        whole_sequences: whether a response has one advantage, not one per token.
    """

    function: Callable[[TokenInputs], TokenLoss]
    needs_advantages: bool
    metrics: tuple[str, ...] = ()
    compares_policies: bool = False
    whole_sequences: bool = False

    def __call__(self, inputs: TokenInputs) -> TokenLoss:
        assert not self.needs_advantages or inputs.advantages_T is not None
        return self.function(inputs)


def entropy_estimate(inputs: TokenInputs) -> Tensor:
    """``[T]`` -logp, whose mean is the policy's entropy while sampling is on-policy."""
    return -inputs.logprobs_T.detach()
