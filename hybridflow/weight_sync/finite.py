"""Refuses weights that are not numbers, where their bytes are read anyway."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class NonFiniteWeights(ArithmeticError):
    """A tensor that is to be published holds NaN or infinity; no server may sample from it."""


def require_finite(flat: Tensor, name: str, version: int) -> None:
    """Refuse `flat`, elements of any shape on any device, if one of them is no number.

    One addition per element tells: NaN and infinity stay in a sum. It is a fiftieth of what hashing
    the same bytes costs.

    Raises:
        NonFiniteWeights: names the tensor and the version.
    """
    if torch.isfinite(flat.sum()):
        return
    lost = flat.numel() - int(torch.isfinite(flat).sum())
    if lost:  # else the sum is too large a number for its type
        raise NonFiniteWeights(
            f"version {version} is not published: {name} holds NaN or infinity ({lost} of the "
            f"{flat.numel()} elements that were looked at); look at update/grad_norm and "
            "update/loss of the last steps"
        )


def watch_finite(
    weights: Iterator[tuple[str, Tensor]], version: int
) -> Iterator[tuple[str, Tensor]]:
    """`weights` as they are; at their end the first fault is raised, since other ranks have their
    part in each of them.

    Raises:
        NonFiniteWeights: see `require_finite`.
    """
    fault: NonFiniteWeights | None = None
    for name, tensor in weights:
        try:
            require_finite(tensor, name, version)
        except NonFiniteWeights as error:
            fault = fault or error
        yield name, tensor
    if fault is not None:
        raise fault
