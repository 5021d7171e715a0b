"""Losses of a critic, per token, and how well its values explain the returns."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.losses.base import TokenLoss, require_same_shape, with_slope
from hybridflow.recipe import catalogue
from hybridflow.recipe.registry import Registry


@dataclass(frozen=True)
class ValueInputs:
    """What a value loss may read, all ``[T]``; only ``values_T`` carries a gradient.

    Attributes:
        values_T: of the state before each response token.
        returns_T: their targets.
        old_values_T: values before the update; None where the loss needs none.
        clip: how far a value may be from the old one.
    """

    values_T: Tensor
    returns_T: Tensor
    old_values_T: Tensor | None = None
    clip: float = 0.2


@dataclass(frozen=True)
class ValueLoss:
    """An entry of the registry of value losses; ``metrics``: names of its metrics."""

    function: Callable[[ValueInputs], TokenLoss]
    metrics: tuple[str, ...] = ()
    needs_old_values: bool = False

    def __call__(self, inputs: ValueInputs) -> TokenLoss:
        assert not self.needs_old_values or inputs.old_values_T is not None
        told = {"returns": inputs.returns_T, "values": inputs.old_values_T}
        require_same_shape(("critic's output", inputs.values_T), **told)
        return self.function(inputs)


def value_mse(inputs: ValueInputs) -> TokenLoss:
    """Half the squared error, ``loss = (V - R)^2 / 2``. Metric: ``value_mean``."""
    loss_T = 0.5 * (inputs.values_T - inputs.returns_T).square()
    return TokenLoss(loss_T, {"value_mean": inputs.values_T.detach().sum()})


def value_clip(inputs: ValueInputs) -> TokenLoss:
    """Half the squared error, or that of the clipped value where it is larger.

    PPO2 of OpenAI's baselines; Engstrom et al., 2020 (arXiv:2005.12729), section 3, equation 1::

        loss = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2

    Metrics: ``value_mean``; ``clip_fraction``, the share of tokens at which the bound cut the
    gradient.
    """
    assert inputs.old_values_T is not None, "ValueLoss checks this"
    values_T, old_T, returns_T = inputs.values_T.detach(), inputs.old_values_T, inputs.returns_T
    error_T = values_T - returns_T
    free_T = error_T.square()
    # Bounds around the old value: a difference added to it again would be off by a rounding, which
    # takes a value within the bounds for one beyond.
    held_T = values_T.clamp(old_T - inputs.clip, old_T + inputs.clip)
    bounded_T = held_T.sub_(returns_T).square_()
    loss_T = torch.maximum(free_T, bounded_T).mul_(0.5)
    # Where the bound is the larger error it does not move with the value.
    cut_T = bounded_T.gt_(free_T)
    loss_T = with_slope(inputs.values_T, loss_T, error_T.mul_(1 - cut_T))
    return TokenLoss(loss_T, {"value_mean": values_T.sum(), "clip_fraction": cut_T.sum()})


def explained_variance(values_T: Tensor, returns_T: Tensor) -> float:
    """``1 - Var(R - V) / Var(R)``: 1 for a perfect critic, 0 for one that says a constant.

    0 where the returns are all equal.
    """
    values_T, returns_T = values_T.double(), returns_T.double()
    spread = returns_T.var(unbiased=False).item() if len(returns_T) else 0.0
    if spread == 0:
        return 0.0
    return 1.0 - (returns_T - values_T).var(unbiased=False).item() / spread


_VALUE_LOSSES: dict[str, ValueLoss] = {
    "value_clip": ValueLoss(value_clip, ("value_mean", "clip_fraction"), needs_old_values=True),
    "value_mse": ValueLoss(value_mse, ("value_mean",)),
}

VALUE_LOSSES = Registry("value loss", _VALUE_LOSSES, aliases=catalogue.VALUE_LOSSES.aliases)
