"""Sums over tokens on every rank, and the means that all ranks report."""

import torch
import torch.distributed as dist
from torch import Tensor


class TokenMetrics:
    """Token means and maxima of an update, reduced over all ranks once at its end.

    Only last pipeline stages see log-probabilities; the other stages add nothing and learn the
    result. Names must be declared, so that every rank reduces the same vector.
    """

    def __init__(self, sums: list[str], maxima: list[str], device: torch.device) -> None:
        self._sums = {name: torch.zeros(2, dtype=torch.float64, device=device) for name in sums}
        self._maxima = {
            name: torch.zeros((), dtype=torch.float64, device=device) for name in maxima
        }

    def add(self, name: str, values_T: Tensor, count: float | None = None) -> None:
        """Adds values, whose sum is divided by their number or by the ``count``s given."""
        self._sums[name][0] += values_T.detach().double().sum()
        self._sums[name][1] += values_T.numel() if count is None else count

    def maximum(self, name: str, values_T: Tensor) -> None:
        """Raises the maximum of ``name``, which is at least 0."""
        if values_T.numel():
            torch.maximum(
                self._maxima[name], values_T.detach().double().max(), out=self._maxima[name]
            )

    def reduce(self) -> dict[str, float]:
        """Means and maxima over all ranks; collective, the same on each."""
        result: dict[str, float] = {}
        if self._sums:
            totals_N2 = torch.stack(list(self._sums.values()))
            dist.all_reduce(totals_N2)
            means = totals_N2[:, 0] / totals_N2[:, 1].clamp(min=1e-12)
            result |= dict(zip(self._sums, means.tolist(), strict=True))
        if self._maxima:
            highest_N = torch.stack(list(self._maxima.values()))
            dist.all_reduce(highest_N, op=dist.ReduceOp.MAX)
            result |= dict(zip(self._maxima, highest_N.tolist(), strict=True))
        return result
