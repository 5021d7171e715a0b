"""Estimators of the KL divergence from a reference, one value per sampled token."""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridflow.algorithms.losses.base import require_same_shape
from hybridflow.recipe import catalogue
from hybridflow.recipe.registry import Registry

# Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
# With d = log pi(x) - log ref(x) and x sampled from pi: k1 is unbiased with high variance, k2 is
# biased with low variance, k3 is unbiased with low variance and never negative (GRPO's choice).
_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference_T: difference_T,
    "k2": lambda difference_T: 0.5 * difference_T.square(),
    "k3": lambda difference_T: torch.expm1(-difference_T) + difference_T,
    "abs": torch.abs,
}

ESTIMATORS = Registry("KL estimator", _ESTIMATORS, aliases=catalogue.KL_ESTIMATORS.aliases)


def kl_divergence(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: str = "k3") -> Tensor:
    """``[T]`` estimates of KL(policy || reference) at each sampled token, in nats.

    ``k1 = d``, ``k2 = d^2 / 2``, ``k3 = exp(-d) - 1 + d``, ``abs = |d|``, where
    ``d = logprobs - ref_logprobs``. Differentiable in ``logprobs_T``.

    Raises:
        UnknownName: ``estimator`` is not registered.
        ValueError: the two differ in shape, or the estimate lost its gradient on the way.
    """
    estimate = ESTIMATORS[estimator]
    require_same_shape(("log-probabilities", logprobs_T), ref_logprobs=ref_logprobs_T)
    result_T = estimate(logprobs_T - ref_logprobs_T)
    if torch.is_grad_enabled() and logprobs_T.requires_grad and not result_T.requires_grad:
        raise ValueError(
            f"KL estimator '{estimator}' detaches the KL term from the log-probabilities: it would "
            "change the loss and no gradient; make it of differentiable operations"
        )
    return result_T
