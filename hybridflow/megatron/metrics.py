"""Sums over tokens on every rank, and the means that all ranks report."""

from collections.abc import Collection
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from hybridflow.algorithms import agreement
from hybridflow.algorithms.agreement import TokenGap
from hybridflow.algorithms.correction import Correction
from hybridflow.batch import Batch, Ragged
from hybridflow.megatron.config import LossSettings


class TokenMetrics:
    """Token means and maxima of an update, reduced over all ranks once at its end.

    Only last pipeline stages see log-probabilities; the other stages add nothing and learn the
    result. Names must be declared, so that every rank reduces the same vector.
    """

    def __init__(self, sums: list[str], maxima: list[str], device: torch.device) -> None:
        names = [*sums, *maxima]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two metrics of the update are named {twice[0]}; rename the loss's")
        self._sums = {name: torch.zeros(2, dtype=torch.float64, device=device) for name in sums}
        self._maxima = {
            name: torch.zeros((), dtype=torch.float64, device=device) for name in maxima
        }

    def add(self, name: str, values_T: Tensor, count: float | None = None) -> None:
        """Adds values, whose sum is divided by their number or by the ``count``s given."""
        self._sums[name][0] += values_T.detach().sum().double()
        self._sums[name][1] += values_T.numel() if count is None else count

    def add_sums(self, sums: dict[str, Tensor], count: int) -> None:
        """Adds sums over ``count`` values each."""
        for name, total in sums.items():
            self.add(name, total, count)

    def maximum(self, name: str, values_T: Tensor) -> None:
        """Raises the maximum of ``name``, which is at least 0."""
        if values_T.numel():
            highest = values_T.detach().double().max().to(self._maxima[name].device)
            torch.maximum(self._maxima[name], highest, out=self._maxima[name])

    def mean(self, name: str) -> float:
        """The mean of ``name`` so far, over all ranks; collective."""
        total_2 = self._sums[name].clone()
        dist.all_reduce(total_2)
        total, count = total_2.tolist()
        return total / max(count, 1e-12)

    def reduce(self, perhaps: Collection[str] = ()) -> dict[str, float]:
        """Means and maxima over all ranks; collective, the same on each.

        Args:
            perhaps: means that are left out where no rank has a value for them.
        """
        result: dict[str, float] = {}
        if self._sums:
            totals_N2 = torch.stack(list(self._sums.values()))
            dist.all_reduce(totals_N2)
            for name, (total, count) in zip(self._sums, totals_N2.tolist(), strict=True):
                if count or name not in perhaps:
                    result[name] = total / max(count, 1e-12)
        if self._maxima:
            highest_N = torch.stack(list(self._maxima.values()))
            dist.all_reduce(highest_N, op=dist.ReduceOp.MAX)
            result |= dict(zip(self._maxima, highest_N.tolist(), strict=True))
        return result


class Measured:
    """What measures an update while it gives the losses of its packs."""

    def check(self) -> None:
        """Raises where the update must not go on; collective, after the first mini-batch's
        gradients and before the first optimizer step."""


class CorrectionMetrics:
    """What the correction of the mismatch between trainer and rollout did.

    ``correction_share`` of the tokens had a ratio out of bounds; ``correction_weight_mean`` is the
    mean weight; ``correction_ess`` the effective sample size by Kish, a share of the tokens:
    ``(sum w)^2 / (N sum w^2)``.
    """

    SUMS = ("correction_share", "correction_weight_mean", "correction_ess")

    @classmethod
    def add(cls, metrics: TokenMetrics, correction: Correction) -> None:
        """Adds the tokens of some rows."""
        weights_T = correction.weights_T.double()
        for name, values_T in zip(
            cls.SUMS, (correction.corrected_T, weights_T, weights_T.square()), strict=True
        ):
            metrics.add(name, values_T)

    @classmethod
    def finish(cls, means: dict[str, float]) -> dict[str, float]:
        """The metrics, in which the mean square of the weights has become their sample size."""
        if "correction_ess" not in means:
            return means
        square = means["correction_ess"]
        ess = means["correction_weight_mean"] ** 2 / square if square else 0.0
        return {**means, "correction_ess": ess}


class RolloutGap:
    """The rollout's log-probabilities beside the trainer's before the first optimizer step.

    Tokens of other weight versions than the trainer's are left out where the batch has
    ``token_versions``.
    """

    SUMS, MAXIMUM = ("rollout_gap_mean", "rollout_kl", "rollout_gap_share"), "rollout_gap_max"

    def __init__(self, settings: LossSettings, batch: Batch, device: torch.device) -> None:
        """``batch``: this rank's rows, all mini-batches."""
        self._threshold = settings.agreement_threshold
        self._bound = settings.agreement_bound
        self._mini_batches = settings.mini_batches
        self._rollout: Ragged = batch["rollout_logprobs"]
        tokens = len(self._rollout.values)
        self._trainer_T = torch.zeros(tokens, device=device)
        self._compared_T = torch.zeros(tokens, dtype=torch.bool, device=device)
        self._current_T = None
        if "token_versions" in batch and settings.weight_version is not None:
            self._current_T = batch["token_versions"].values == settings.weight_version

    def record(self, places_R: Tensor, logprobs_R: Tensor) -> None:
        """Takes the trainer's log-probabilities of a pack, by place in the batch's responses."""
        self._trainer_T[places_R] = logprobs_R.detach().float()
        self._compared_T[places_R] = True

    def check(self) -> None:
        """Collective over all ranks where there is a bound.

        Raises:
            Disagreement: a token differs by more than the bound; on every rank.
        """
        if self._bound is None:
            return
        worst = agreement.worst_token(*self._compared())
        worst = None if worst is None else replace(worst, sample=self._in_batch(worst.sample))
        agreement.check(_worst_of_all(worst, self._trainer_T.device), self._bound)

    def _in_batch(self, sample: int) -> int:
        """The place in the whole batch of one of this rank's samples: each mini-batch is shared
        out over the ranks."""
        share = max(len(self._rollout) // self._mini_batches, 1)
        replicas = parallel_state.get_data_parallel_world_size()
        turn, place = divmod(sample, share)
        return (turn * replicas + parallel_state.get_data_parallel_rank()) * share + place

    def _compared(self) -> tuple[Ragged, Tensor, Tensor]:
        """The rollout's log-probabilities, the trainer's, and which tokens are compared."""
        compared_T = self._compared_T.cpu()
        if self._current_T is not None:
            compared_T &= self._current_T
        rollout = self._rollout.with_values(self._rollout.values.float())
        return rollout, self._trainer_T.cpu(), compared_T

    def report(self, metrics: TokenMetrics) -> None:
        """Adds what was recorded to ``metrics``."""
        rollout, trainer_T, compared_T = self._compared()
        values = agreement.gap_values(
            rollout.values[compared_T], trainer_T[compared_T], self._threshold
        )
        for name, values_T in values.items():
            metrics.add(name, values_T)
        metrics.maximum(self.MAXIMUM, values["rollout_gap_mean"])


def _worst_of_all(mine: TokenGap | None, device: torch.device) -> TokenGap | None:
    """The worst token over all ranks; collective."""
    row = [-1, 0, 0, 0]
    if mine is not None:
        row = [mine.sample, mine.token, mine.rollout, mine.trainer]
    row_4 = torch.tensor(row, dtype=torch.float64, device=device)
    rows = [torch.empty_like(row_4) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row_4)
    gaps = [
        TokenGap(int(sample), int(token), rollout, trainer)
        for sample, token, rollout, trainer in (found_4.tolist() for found_4 in rows)
        if sample >= 0
    ]
    return max(gaps, key=lambda each: each.gap, default=None)
