"""The exact KL divergence from the reference, over the whole vocabulary.

What crosses processes is the reference's final hidden state, one vector of the model's width a
token; the policy's ranks hold the output head that the reference has, frozen, cut over them as
their own, and make the reference's logits of one pack at a time.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from hybridflow.megatron.logprobs import VocabParallelLogits, all_reduce, in_parts

_CLOSED = -1e30
"""A logit of the vocabulary's padding: its probability is 0."""


class ReferenceHead:
    """The output head with which a model was loaded, before it trains.

    Args:
        model: a ``GPTModel`` on the last pipeline stage, tied or not.
        vocabulary: ids of the tokenizer; columns beyond are padding.
    """

    def __init__(self, model: Any, vocabulary: int) -> None:
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        self._weight_VH: Tensor = weight.detach().clone()
        width = len(self._weight_VH)
        first = parallel_state.get_tensor_model_parallel_rank() * width
        self._real = min(max(vocabulary - first, 0), width)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """``[R, V / tp]`` this rank's columns of the reference's logits."""
        logits_RV = hidden_RH.to(self._weight_VH) @ self._weight_VH.T
        logits_RV[:, self._real :] = _CLOSED
        return logits_RV


class _Kl(torch.autograd.Function):
    """``KL_t = sum_v p_v (log p_v - log q_v)``, and its derivative by the policy's logits,
    ``p_v (log p_v - log q_v - KL) / temperature``."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, ref_logits_TV: Tensor, temperature: float, group: Any
    ) -> Tensor:
        mine_TV, ref_TV = logits_TV.float() / temperature, ref_logits_TV.float() / temperature
        maxima_2T = torch.stack([mine_TV.amax(dim=1), ref_TV.amax(dim=1)])
        all_reduce(maxima_2T, dist.ReduceOp.MAX, group)
        difference_TV = mine_TV - ref_TV
        exp_TV = mine_TV.sub_(maxima_2T[0][:, None]).exp_()
        sums_3T = torch.stack(
            [
                exp_TV.sum(dim=1),
                ref_TV.sub_(maxima_2T[1][:, None]).exp_().sum(dim=1),
                _products(exp_TV, difference_TV),
            ]
        )
        all_reduce(sums_3T, dist.ReduceOp.SUM, group)
        log_totals_2T = sums_3T[:2].log() + maxima_2T
        # log p - log q = difference + shift
        shift_T = log_totals_2T[1] - log_totals_2T[0]
        kl_T = sums_3T[2] / sums_3T[0] + shift_T
        ctx.dtype, ctx.buffers = logits_TV.dtype, (exp_TV, difference_TV)
        ctx.save_for_backward(sums_3T[0] * temperature, shift_T - kl_T)
        return kl_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_T,), (scale_T, shift_T) = grads, ctx.saved_tensors
        (exp_TV, grad_TV), ctx.buffers = ctx.buffers, None
        grad_TV.add_(shift_T[:, None]).mul_(exp_TV).mul_((grad_T / scale_T)[:, None])
        return grad_TV.to(ctx.dtype), None, None, None


def full_kl(logits: VocabParallelLogits, ref_logits_TV: Tensor) -> Tensor:
    """``[T]`` float32 KL(policy || reference) in nats at each position, exact, differentiable in
    the policy's logits.

    Args:
        ref_logits_TV: ``[T, V / tp]`` the same columns of the reference's logits.
    """
    result = _Kl.apply(logits.logits_TV, ref_logits_TV, logits.temperature, logits.group)
    assert isinstance(result, Tensor)
    return result


def _products(left_TV: Tensor, right_TV: Tensor) -> Tensor:
    """``[T]`` sum over V of the products."""
    pairs = zip(in_parts(left_TV), in_parts(right_TV), strict=True)
    return torch.cat([(left * right).sum(dim=1) for left, right in pairs])
