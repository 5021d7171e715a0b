"""Log-probabilities and entropy from logits whose vocabulary is cut over tensor-parallel ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SCRATCH_VALUES = 1 << 24
"""Most values of a temporary beside the buffer of a pack's probabilities."""


class _VocabParallel(torch.autograd.Function):
    """Ranks exchange a few numbers a token: the maximum, then sums over the vocabulary.

    One buffer of the logits' size holds exp(logits), from which backward makes the gradient in
    place. With ``p = softmax(logits / temperature)`` and the entropy ``H = -sum_v p_v log p_v``::

        dlogp / dlogit_v = (1[v = label] - p_v) / temperature
        dH / dlogit_v    = -p_v (log p_v + H) / temperature
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        vocab_start: int,
        temperature: float,
        group: Any,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        width = logits_TV.shape[1]
        scaled_TV = logits_TV.float()
        if temperature != 1.0:
            scaled_TV = scaled_TV / temperature
        maximum_T = scaled_TV.amax(dim=1)
        all_reduce(maximum_T, dist.ReduceOp.MAX, group)
        exp_TV = torch.sub(scaled_TV, maximum_T[:, None]).exp_()

        local_T = labels_T - vocab_start
        mine_T = (local_T >= 0) & (local_T < width)
        local_T = local_T.clamp(0, width - 1)
        label_logit_T = scaled_TV.gather(1, local_T[:, None])[:, 0] - maximum_T
        parts = [exp_TV.sum(dim=1), torch.where(mine_T, label_logit_T, 0.0)]
        if with_entropy:
            parts.append(_sum_of_x_log_x(exp_TV))
        sums_NT = torch.stack(parts)
        all_reduce(sums_NT, dist.ReduceOp.SUM, group)
        total_T, label_logit_T = sums_NT[0], sums_NT[1]
        log_total_T = total_T.log()
        entropy_T = log_total_T - sums_NT[2] / total_T if with_entropy else None

        ctx.temperature, ctx.dtype = temperature, logits_TV.dtype
        ctx.exp_TV = exp_TV
        ctx.save_for_backward(total_T, local_T, mine_T, log_total_T, entropy_T)
        ctx.set_materialize_grads(False)
        return label_logit_T - log_total_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_T, entropy_grad_T = grads
        total_T, local_T, mine_T, log_total_T, entropy_T = ctx.saved_tensors
        grad_T = torch.zeros_like(total_T) if grad_T is None else grad_T / ctx.temperature
        grad_TV, ctx.exp_TV = (
            ctx.exp_TV,
            None,
        )  # its place is the gradient's: a second backward fails
        if entropy_grad_T is None:
            grad_TV.mul_((-grad_T / total_T)[:, None])
        else:
            weight_T = entropy_grad_T / ctx.temperature
            linear_T = -(grad_T + weight_T * (entropy_T - log_total_T)) / total_T
            _scale_and_add_x_log_x(grad_TV, linear_T, -weight_T / total_T)
        grad_TV.scatter_add_(1, local_T[:, None], torch.where(mine_T, grad_T, 0.0)[:, None])
        return grad_TV.to(ctx.dtype), None, None, None, None, None


@dataclass(frozen=True)
class TokenReadings:
    """What the logits say of each of T labels, float32, in nats; ``entropy_T`` where asked for."""

    logprobs_T: Tensor
    entropy_T: Tensor | None = None

    def of(self, chosen_T: Tensor) -> "TokenReadings":
        """Those of the tokens whose ``chosen_T`` is true."""
        entropy_T = None if self.entropy_T is None else self.entropy_T[chosen_T]
        return TokenReadings(self.logprobs_T[chosen_T], entropy_T)


@dataclass(frozen=True)
class VocabParallelLogits:
    """Logits of one pack, to be read once.

    Attributes:
        logits_TV: ``[T, V / tp]`` this rank's columns of the logits; those of the vocabulary's
            padding hold values so low that their exponential is 0.
        labels_T: ``[T]`` int64 ids in the whole vocabulary.
        vocab_start: id of the first column.
        group: tensor-parallel group; every rank of it reads the same.
        temperature: divides the logits.
    """

    logits_TV: Tensor
    labels_T: Tensor
    vocab_start: int
    group: Any
    temperature: float = 1.0

    def read(self, entropy: bool = False) -> TokenReadings:
        """Log-probability of each label under ``softmax(logits / temperature)``, differentiable.

        Args:
            entropy: whether to give the entropy of that distribution too, exact, differentiable.
        """
        logprobs_T, entropy_T = _VocabParallel.apply(  # type: ignore[misc]
            self.logits_TV,
            self.labels_T,
            self.vocab_start,
            self.temperature,
            self.group,
            entropy,
        )
        return TokenReadings(logprobs_T, entropy_T)


def _sum_of_x_log_x(values_TV: Tensor) -> Tensor:
    """``[T]`` sum over V of x log x, 0 where x is 0."""
    return torch.cat([torch.xlogy(x, x).sum(dim=1) for x in in_parts(values_TV)])


def _scale_and_add_x_log_x(values_TV: Tensor, scale_T: Tensor, factor_T: Tensor) -> None:
    """In place: x becomes ``scale * x + factor * x log x``."""
    parts = (in_parts(values_TV), in_parts(scale_T, values_TV), in_parts(factor_T, values_TV))
    for x, scale, factor in zip(*parts, strict=True):
        x_log_x = torch.xlogy(x, x)
        x.mul_(scale[:, None]).addcmul_(x_log_x, factor[:, None])


def in_parts(values: Tensor, like_TV: Tensor | None = None) -> tuple[Tensor, ...]:
    """Runs of rows as views, such that a temporary of one run stays small."""
    width = (values if like_TV is None else like_TV).shape[1]
    return values.split(max(1, _SCRATCH_VALUES // max(width, 1)))


def all_reduce(values: Tensor, operation: Any, group: Any) -> None:
    if group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
