"""Log-probabilities from logits whose vocabulary is cut over tensor-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallelLogprobs(torch.autograd.Function):
    """Ranks exchange three numbers a token: the maximum, the partition sum, the label's logit.

    One buffer of the logits' size holds exp(logits), from which backward makes the gradient in
    place: ``dlogp/dlogit_v = (1[v = label] - softmax_v) / temperature``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        vocab_start: int,
        temperature: float,
        group: Any,
    ) -> Tensor:
        width = logits_TV.shape[1]
        scaled_TV = logits_TV.float()
        if temperature != 1.0:
            scaled_TV = scaled_TV / temperature
        maximum_T = scaled_TV.amax(dim=1)
        _all_reduce(maximum_T, dist.ReduceOp.MAX, group)
        exp_TV = torch.sub(scaled_TV, maximum_T[:, None]).exp_()

        local_T = labels_T - vocab_start
        mine_T = (local_T >= 0) & (local_T < width)
        local_T = local_T.clamp(0, width - 1)
        label_logit_T = scaled_TV.gather(1, local_T[:, None])[:, 0] - maximum_T
        sums_2T = torch.stack([exp_TV.sum(dim=1), torch.where(mine_T, label_logit_T, 0.0)])
        _all_reduce(sums_2T, dist.ReduceOp.SUM, group)
        total_T, label_logit_T = sums_2T

        ctx.temperature, ctx.dtype = temperature, logits_TV.dtype
        ctx.exp_TV = exp_TV
        ctx.save_for_backward(total_T, local_T, mine_T)
        return label_logit_T - total_T.log()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_T,) = grads
        total_T, local_T, mine_T = ctx.saved_tensors
        scaled_T = grad_T / ctx.temperature
        grad_TV = ctx.exp_TV.mul_((-scaled_T / total_T)[:, None])
        ctx.exp_TV = None  # its place is the gradient's now: a second backward must fail
        grad_TV.scatter_add_(1, local_T[:, None], torch.where(mine_T, scaled_T, 0.0)[:, None])
        return grad_TV.to(ctx.dtype), None, None, None, None


def vocab_parallel_logprobs(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    vocab_start: int,
    group: Any,
    temperature: float = 1.0,
) -> Tensor:
    """``[T]`` float32 log-probability of each label under ``softmax(logits / temperature)``.

    Args:
        logits_TV: ``[T, V / tp]`` this rank's columns of the logits; those of the vocabulary's
            padding hold values so low that their exponential is 0.
        labels_T: ``[T]`` int64 ids in the whole vocabulary.
        vocab_start: id of the first column.
        group: tensor-parallel group; every rank of it gets the same result.
    """
    result = _VocabParallelLogprobs.apply(logits_TV, labels_T, vocab_start, temperature, group)
    assert isinstance(result, Tensor)
    return result


def _all_reduce(values: Tensor, operation: Any, group: Any) -> None:
    if group.size() > 1:
        dist.all_reduce(values, op=operation, group=group)
