"""The loss of an update, pack by pack, and what it measures on the way."""

import torch
from megatron.core import parallel_state
from torch import Tensor

from hybridflow.algorithms import LOSSES, PREFERENCES, agreement
from hybridflow.algorithms.aggregation import weighted_sum
from hybridflow.algorithms.correction import off_policy_masked
from hybridflow.algorithms.kl import kl_divergence
from hybridflow.algorithms.losses import Sequences, TokenInputs, TokenLoss
from hybridflow.algorithms.packing import Pack
from hybridflow.batch import Batch
from hybridflow.megatron.config import LossSettings
from hybridflow.megatron.full_kl import ReferenceHead, full_kl
from hybridflow.megatron.logprobs import TokenReadings, VocabParallelLogits
from hybridflow.megatron.metrics import CorrectionMetrics, Measured, RolloutGap, TokenMetrics
from hybridflow.megatron.preference import PreferenceUpdateLoss
from hybridflow.megatron.rows import Rows
from hybridflow.megatron.step import PackLoss

OLD_GAP = "old_gap_mean"


def update_loss(
    settings: LossSettings,
    batch: Batch,
    device: torch.device,
    reference_head: ReferenceHead | None = None,
) -> "UpdateLoss | PreferenceUpdateLoss":
    """The loss that ``settings`` name, of tokens or of whole responses.

    Args:
        reference_head: of the KL over the whole vocabulary, on last pipeline stages.
    """
    if settings.name in PREFERENCES:
        return PreferenceUpdateLoss(settings, batch, device)
    return UpdateLoss(settings, batch, device, reference_head)


class UpdateLoss(Measured):
    """Makes the loss of each mini-batch and gathers the metrics of the whole update."""

    def __init__(
        self,
        settings: LossSettings,
        batch: Batch,
        device: torch.device,
        reference_head: ReferenceHead | None = None,
    ) -> None:
        self._settings = settings
        self._device = device
        self._reference_head = reference_head
        self._loss = LOSSES[settings.name]
        sums = ["loss", "tokens", "response_length_mean", *self._loss.metrics]
        maxima = []
        if "ref_logprobs" in batch or "ref_hidden" in batch:
            sums.append("kl")
        self._compares_old = "old_logprobs" in batch
        if self._compares_old:
            sums.extend((OLD_GAP, "policy_kl"))
        if settings.reads_entropy:
            sums.append("entropy")
        if settings.off_policy_bound is not None:
            sums.append("off_policy_masked")
        if settings.correction is not None:
            sums.extend(CorrectionMetrics.SUMS)
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

        def pack_loss(pack: Pack, logits: VocabParallelLogits) -> Tensor:
            readings = logits.read(entropy=self._settings.reads_entropy)
            kl_R = self._kl(rows, pack, logits, readings)
            if first:
                self._compare(rows, pack, readings.logprobs_T.detach())
            if rows.correction is not None:
                kept_R = rows.correction.kept_T[pack.source_R]
                pack, readings = pack.predicting(kept_R), readings.of(kept_R)
                kl_R = None if kl_R is None else kl_R[kept_R]
            token_loss = self._token_loss(rows, pack, readings, kl_R)
            weighted = weighted_sum(rows.weights_T, token_loss.loss_T, pack.source_R)
            self._metrics.add("loss", weighted, rows.normaliser / len(rows.packs))
            self._metrics.add_sums(token_loss.sums, len(pack.source_R))
            return weighted * scale

        return pack_loss

    def _compare(self, rows: Rows, pack: Pack, logprobs_R: Tensor) -> None:
        """The weights before the update beside what sampled, and beside the old policy."""
        if self._gap is not None:
            self._gap.record(pack.source_R + rows.start, logprobs_R)
        if rows.old_logprobs_T is not None:
            self._metrics.add(OLD_GAP, (logprobs_R - rows.old_logprobs_T[pack.source_R]).abs())

    def _token_loss(
        self, rows: Rows, pack: Pack, readings: TokenReadings, kl_R: Tensor | None
    ) -> TokenLoss:
        """The loss of every token: the policy's, corrected, then the terms that stand beside it."""
        settings = self._settings
        inputs = self._inputs(rows, pack, readings.logprobs_T)
        result = self._loss(inputs)
        loss_R, sums = result.loss_T, dict(result.sums)
        if rows.correction is not None:
            loss_R = loss_R * rows.correction.weights_T[pack.source_R]
        if settings.off_policy_bound is not None:
            masked_R = self._off_policy(rows, pack, inputs)
            loss_R = torch.where(masked_R, 0.0, loss_R)
            sums["off_policy_masked"] = masked_R.sum()
        if self._compares_old:
            now_R = readings.logprobs_T.detach()
            sums["policy_kl"] = kl_divergence(inputs.old_logprobs_T, now_R).sum()
        if kl_R is not None:
            loss_R = loss_R + settings.kl_coef * kl_R if settings.kl_coef else loss_R
            sums["kl"] = kl_R.detach().sum()
        if readings.entropy_T is not None:
            if settings.entropy_coef:
                loss_R = loss_R - settings.entropy_coef * readings.entropy_T
            sums["entropy"] = readings.entropy_T.detach().sum()
        return TokenLoss(loss_R, sums)

    def _kl(
        self, rows: Rows, pack: Pack, logits: VocabParallelLogits, readings: TokenReadings
    ) -> Tensor | None:
        """The KL from the reference at every token, in full or by an estimate."""
        if rows.ref_hidden is not None:
            assert self._reference_head is not None, "the engine keeps it for this estimator"
            hidden_RH = rows.ref_hidden.values[pack.source_R.cpu()].to(self._device)
            return full_kl(logits, self._reference_head.logits(hidden_RH))
        if rows.ref_logprobs_T is None:
            return None
        ref_logprobs_R = rows.ref_logprobs_T[pack.source_R]
        return kl_divergence(readings.logprobs_T, ref_logprobs_R, self._settings.kl_estimator)

    def _inputs(self, rows: Rows, pack: Pack, logprobs_R: Tensor) -> TokenInputs:
        settings, old = self._settings, rows.old_logprobs_T
        return TokenInputs(
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

    def _off_policy(self, rows: Rows, pack: Pack, inputs: TokenInputs) -> Tensor:
        bound = self._settings.off_policy_bound
        assert bound is not None and rows.rollout_logprobs_T is not None, "check_fields looks"
        return off_policy_masked(
            inputs.logprobs_T,
            rows.rollout_logprobs_T[pack.source_R],
            inputs.told_advantages(),
            inputs.told_sequences(),
            bound,
        )

    def check(self) -> None:
        """Raises:
        Disagreement: rollout and trainer differ by more than ``settings.agreement_bound``, or
            the old policy and the trainer by more than ``settings.old_bound``.
        """
        if self._gap is not None:
            self._gap.check()
        if self._compares_old and self._settings.old_bound is not None:
            agreement.check_old(self._metrics.mean(OLD_GAP), self._settings.old_bound)

    def reduce(self, parts: list[Rows]) -> dict[str, float]:
        """Metrics of the update, the same on every rank; collective."""
        replicas = parallel_state.get_data_parallel_world_size()
        tokens = torch.tensor(float(sum(rows.tokens for rows in parts)))
        self._metrics.add("tokens", tokens, 1 / replicas)
        self._metrics.add("response_length_mean", tokens, sum(rows.responses for rows in parts))
        for rows in parts:
            if rows.correction is not None:
                CorrectionMetrics.add(self._metrics, rows.correction)
        if self._gap is not None:
            self._gap.report(self._metrics)
        found = self._metrics.reduce(perhaps=RolloutGap.SUMS)
        if RolloutGap.SUMS[0] not in found:  # all tokens are of older weights
            found.pop(RolloutGap.MAXIMUM, None)
        return CorrectionMetrics.finish(found)
