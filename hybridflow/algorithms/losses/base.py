"""What a loss of sampled tokens reads and gives."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import Ragged
from hybridflow.ragged import RUN


@dataclass(frozen=True)
class Sequences:
    """Which response each of T tokens belongs to, so that a loss can look at whole responses.

    The tokens of a response lie side by side, responses in order.

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
        return self.spread(self.means(values_T))

    def sum(self, values_T: Tensor) -> Tensor:
        """``[T]`` the sum over each token's whole response, differentiable."""
        return self.spread(self._sums(values_T))

    def means(self, values_T: Tensor) -> Tensor:
        """``[S]`` the mean over each response, 0 of one without tokens; differentiable."""
        return self._sums(values_T) / self.lengths_S.clamp(min=1)

    def spread(self, values_S: Tensor) -> Tensor:
        """``[T]`` the value of each token's response, differentiable."""
        return values_S.index_select(0, self.index_T)

    def scale(self, values_T: Tensor, factors_S: Tensor) -> Tensor:
        """``values_T`` itself, each value times the factor of its response."""
        for start in range(0, len(values_T), RUN):
            index_t = self.index_T[start : start + RUN]
            values_T[start : start + RUN] *= factors_S.index_select(0, index_t)
        return values_T

    def firsts(self, values_T: Tensor) -> Tensor:
        """``[S]`` the value of each response's first token; of one without tokens any."""
        first_S = self.lengths_S.cumsum(0) - self.lengths_S
        return values_T[first_S.clamp(max=len(values_T) - 1)] if len(values_T) else values_T

    def counts(self, flags_T: Tensor) -> Tensor:
        """``[S]`` int64 number of flagged tokens of each response."""
        counts_S = torch.zeros_like(self.lengths_S)
        return counts_S.index_add(0, self.index_T, flags_T.to(counts_S.dtype))

    def _sums(self, values_T: Tensor) -> Tensor:
        if not len(self.lengths_S):
            return values_T.new_zeros(0)
        return torch.segment_reduce(values_T, "sum", lengths=self.lengths_S)


class _WithSlope(torch.autograd.Function):
    """A loss per token whose derivative by the token's own log-probability is known.

    The formulas of a loss share most of their products with those of its derivative; autograd would
    go over the tokens anew for each step back.
    """

    @staticmethod
    def forward(ctx: Any, logprobs_T: Tensor, loss_T: Tensor, slope_T: Tensor) -> Tensor:
        ctx.mark_dirty(loss_T)
        ctx.save_for_backward(slope_T)
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_T,), (slope_T,) = grads, ctx.saved_tensors
        # In its place: autograd refuses a second backward, since the saved tensor has changed.
        return slope_T.mul_(grad_T), None, None


class _OfSequences(torch.autograd.Function):
    """A loss per token that its whole response shares, with its derivative by the response's mean
    log-probability."""

    @staticmethod
    def forward(
        ctx: Any,
        logprobs_T: Tensor,
        loss_T: Tensor,
        slope_S: Tensor,
        sequences: "Sequences",
        free_T: Tensor | None,
    ) -> Tensor:
        ctx.mark_dirty(loss_T)
        ctx.sequences = sequences
        ctx.save_for_backward(slope_S, free_T)
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_T,), (slope_S, free_T) = grads, ctx.saved_tensors
        moved_S = ctx.sequences.means(grad_T) * slope_S
        if free_T is None:
            return ctx.sequences.spread(moved_S), None, None, None, None
        # In its place, as the slope above.
        return ctx.sequences.scale(free_T, moved_S), None, None, None, None


def with_slope(logprobs_T: Tensor, loss_T: Tensor, slope_T: Tensor) -> Tensor:
    """``loss_T``, a new tensor without gradient, as a function of ``logprobs_T`` whose derivative
    is ``slope_T``."""
    result = _WithSlope.apply(logprobs_T, loss_T, slope_T)
    assert isinstance(result, Tensor)
    return result


def of_sequences(
    logprobs_T: Tensor,
    loss_T: Tensor,
    slope_S: Tensor,
    sequences: "Sequences",
    free_T: Tensor | None = None,
) -> Tensor:
    """``loss_T``, a new tensor without gradient in which each response has one loss, as a function
    of its mean log-probability whose derivative is ``slope_S``.

    Tokens whose ``free_T``, a new tensor of 0 and 1, is 0 have no part in the gradient.
    """
    result = _OfSequences.apply(logprobs_T, loss_T, slope_S, sequences, free_T)
    assert isinstance(result, Tensor)
    return result


@dataclass(frozen=True)
class TokenLoss:
    """A loss of every token and what is worth a metric.

    Attributes:
        loss_T: ``[T]``, differentiable.
        sums: name -> sum over the tokens, detached; the means over all tokens are reported.
    """

    loss_T: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenTerms:
    """A loss whose derivative is written out, of single tokens.

    Attributes:
        loss_T: ``[T]`` without gradient.
        slope_T: ``[T]`` a new tensor: the loss's derivative by the token's log-probability.
        sums: as those of ``TokenLoss``.
    """

    loss_T: Tensor
    slope_T: Tensor
    sums: dict[str, Tensor]


TokenFunction = Callable[["TokenInputs"], TokenTerms]


def by_token(function: TokenFunction) -> "Callable[[TokenInputs], TokenLoss]":
    """The loss of all tokens from a function of some, called for ``RUN`` tokens at a time.

    Temporaries of so few tokens stay in the processor's cache, and what is kept of a token is its
    loss and its slope.
    """

    @wraps(function)
    def loss(inputs: TokenInputs) -> TokenLoss:
        terms = _in_runs(function, inputs) if len(inputs.logprobs_T) > RUN else function(inputs)
        loss_T = with_slope(inputs.logprobs_T, terms.loss_T, terms.slope_T)
        return TokenLoss(loss_T, {**terms.sums, **entropy_estimate(inputs)})

    return loss


def _in_runs(function: TokenFunction, inputs: "TokenInputs") -> TokenTerms:
    loss_T = torch.empty_like(inputs.logprobs_T, requires_grad=False)
    slope_T = torch.empty_like(loss_T)
    sums: dict[str, Tensor] = {}
    for start in range(0, len(loss_T), RUN):
        span = slice(start, start + RUN)
        terms = function(inputs.of_tokens(span))
        loss_T[span], slope_T[span] = terms.loss_T, terms.slope_T
        add_sums(sums, terms.sums)
    return TokenTerms(loss_T, slope_T, sums)


def add_sums(sums: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Adds each of ``others`` to that of ``sums``."""
    for name, total in others.items():
        sums[name] = sums[name] + total if name in sums else total


_LARGEST_LOG_RATIO = 60.0
"""Of a ratio whose products with advantages stay finite in float32: an infinite ratio times the 0
of a bound would be no number, where the bound is there for just such tokens."""


def ratio_of(gap: Tensor) -> Tensor:
    """The ratio of two policies from the difference of their log-probabilities, in its place."""
    return gap.clamp_(max=_LARGEST_LOG_RATIO).exp_()


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

    def of_tokens(self, span: slice) -> "TokenInputs":
        """Those of some tokens, without gradient and without their responses."""
        advantages_T = None if self.advantages_T is None else self.advantages_T[span]
        return replace(
            self,
            logprobs_T=self.logprobs_T.detach()[span],
            old_logprobs_T=self.old_logprobs_T[span],
            advantages_T=advantages_T,
            sequences=None,
        )

    @property
    def ratio_T(self) -> Tensor:
        """``[T]`` probability of each token over its probability when it was sampled, without
        gradient."""
        return ratio_of(torch.sub(self.logprobs_T.detach(), self.old_logprobs_T))

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
        require_same_shape(
            ("log-probabilities", inputs.logprobs_T),
            old_logprobs=inputs.old_logprobs_T,
            advantages=inputs.advantages_T,
        )
        result = self.function(inputs)
        require_same_shape(("loss", result.loss_T), **{"log-probabilities": inputs.logprobs_T})
        if unknown := result.sums.keys() - set(self.metrics):
            raise ValueError(
                f"the loss gives the metrics {', '.join(sorted(unknown))}, which it did not "
                "declare; a loss gives the same metrics in each call"
            )
        wanted = torch.is_grad_enabled() and inputs.logprobs_T.requires_grad
        if wanted and not result.loss_T.requires_grad:
            raise ValueError(
                "the loss is detached from the log-probabilities: nothing would be learnt; make "
                "it of differentiable operations, or use `with_slope`"
            )
        return result


def entropy_estimate(inputs: TokenInputs) -> dict[str, Tensor]:
    """The sum of -logp, whose mean is the policy's entropy while sampling is on-policy."""
    return {"entropy_estimate": -inputs.logprobs_T.detach().sum()}


def require_same_shape(first: tuple[str, Tensor], **others: Tensor | None) -> None:
    """ValueError naming a tensor of another shape: ``[T]`` beside ``[T, 1]`` would make ``[T, T]``
    without a word."""
    name, tensor = first
    for other, given in others.items():
        if given is not None and given.shape != tensor.shape:
            raise ValueError(
                f"'{other}' has the shape {list(given.shape)} and the {name} "
                f"{list(tensor.shape)}; each token has one of both"
            )
