"""The loss of an update, pack by pack, and what it measures on the way."""

import torch
from megatron.core import parallel_state
from torch import Tensor

from hybridflow.algorithms import LOSSES
from hybridflow.algorithms.kl import kl_divergence
from hybridflow.algorithms.losses import Sequences, TokenInputs, TokenLoss
from hybridflow.algorithms.packing import Pack
from hybridflow.batch import Batch
from hybridflow.megatron.config import LossSettings
from hybridflow.megatron.metrics import RolloutGap, TokenMetrics
from hybridflow.megatron.rows import Rows
from hybridflow.megatron.step import PackLoss


class UpdateLoss:
    """Makes the loss of each mini-batch and gathers the metrics of the whole update."""

    def __init__(self, settings: LossSettings, batch: Batch, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._loss = LOSSES[settings.name]
        sums = ["loss", "tokens", "response_length_mean", *self._loss.metrics]
        maxima = []
        if "ref_logprobs" in batch:
            sums.append("kl")
        self._gap = RolloutGap(settings, batch, device) if "rollout_logprobs" in batch else None
        if self._gap is not None:
            sums.extend(RolloutGap.SUMS)
            maxima.append(RolloutGap.MAXIMUM)
        self._metrics = TokenMetrics(sums, maxima, device)

    def of(self, rows: Rows, normaliser: float, first: bool) -> PackLoss:
        """The loss of a pack of ``rows``.

        Args:
            normaliser: of the mini-batch, over all data-parallel ranks.
            first: whether the weights are still those before the update.
        """
        rows = rows.to(self._device)
        # The data-parallel wrapper averages gradients over its ranks; the loss is a sum over them.
        scale = parallel_state.get_data_parallel_world_size() / normaliser

        def pack_loss(pack: Pack, logprobs_R: Tensor) -> Tensor:
            token_loss = self._token_loss(rows, pack, logprobs_R)
            if first and self._gap is not None:
                self._gap.record(pack.source_R, logprobs_R)
            weighted = (rows.weights_T[pack.source_R] * token_loss.loss_T).sum()
            self._metrics.add("loss", weighted, rows.normaliser / len(rows.packs))
            for name, values_R in token_loss.metrics_T.items():
                self._metrics.add(name, values_R)
            return weighted * scale

        return pack_loss

    def _token_loss(self, rows: Rows, pack: Pack, logprobs_R: Tensor) -> TokenLoss:
        settings = self._settings
        old = rows.old_logprobs_T
        inputs = TokenInputs(
            logprobs_T=logprobs_R,
            # On-policy without old log-probabilities: the current ones are the old ones.
            old_logprobs_T=logprobs_R.detach() if old is None else old[pack.source_R],
            advantages_T=None if rows.advantages_T is None else rows.advantages_T[pack.source_R],
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            tau_positive=settings.tau_positive,
            tau_negative=settings.tau_negative,
            sequences=Sequences(pack.sequence_R, pack.responses_N),
        )
        result = self._loss(inputs)
        if rows.ref_logprobs_T is None:
            return result
        ref_logprobs_R = rows.ref_logprobs_T[pack.source_R]
        kl_R = kl_divergence(logprobs_R, ref_logprobs_R, settings.kl_estimator)
        loss_R = result.loss_T + settings.kl_coef * kl_R if settings.kl_coef else result.loss_T
        return TokenLoss(loss_R, {**result.metrics_T, "kl": kl_R.detach()})

    def reduce(self, parts: list[Rows]) -> dict[str, float]:
        """Metrics of the update, the same on every rank; collective.

        Raises:
            Disagreement: rollout and trainer differ by more than ``settings.agreement_bound``.
        """
        replicas = parallel_state.get_data_parallel_world_size()
        tokens = torch.tensor(float(sum(rows.tokens for rows in parts)))
        self._metrics.add("tokens", tokens, 1 / replicas)
        self._metrics.add("response_length_mean", tokens, sum(rows.responses for rows in parts))
        if self._gap is not None:
            self._gap.report(self._metrics)
        return self._metrics.reduce()
