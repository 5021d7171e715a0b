"""The loss of an update on whole responses: pairs, or responses with labels."""

import torch
from megatron.core import parallel_state
from torch import Tensor

from hybridflow.algorithms.losses.preference import PREFERENCES, Responses
from hybridflow.algorithms.packing import Pack
from hybridflow.batch import Batch
from hybridflow.megatron.config import LossSettings
from hybridflow.megatron.logprobs import VocabParallelLogits
from hybridflow.megatron.metrics import Measured, TokenMetrics
from hybridflow.megatron.rows import Rows
from hybridflow.megatron.step import PackLoss


class PreferenceUpdateLoss(Measured):
    """As ``UpdateLoss``. A pair is never cut, so a pack's loss is the sum over its pairs."""

    def __init__(self, settings: LossSettings, batch: Batch, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._loss = PREFERENCES[settings.name]
        self._kl_baseline = batch.fields.get("kl_baseline")
        sums = ["loss", "tokens", "response_length_mean", *self._loss.metrics]
        self._metrics = TokenMetrics(sums, [], device)

    def of(self, rows: Rows, normaliser: float, first: bool) -> PackLoss:
        """The loss of a pack of ``rows``; ``normaliser`` is the number of pairs, or responses, of
        the mini-batch over all data-parallel ranks."""
        rows = rows.to(self._device)
        # The data-parallel wrapper averages gradients over its ranks; the loss is a sum over them.
        scale = parallel_state.get_data_parallel_world_size() / normaliser

        def pack_loss(pack: Pack, logits: VocabParallelLogits) -> Tensor:
            responses = self._responses(rows, pack, logits.read().logprobs_T)
            found = self._loss(responses, self._settings.preference)
            total = found.loss_N.sum()
            self._metrics.add("loss", total, len(found.loss_N))
            for name, values in found.metrics.items():
                self._metrics.add(name, values)
            return total * scale

        return pack_loss

    def _responses(self, rows: Rows, pack: Pack, logprobs_R: Tensor) -> Responses:
        count, ref_S = len(pack.responses_N), None
        if rows.ref_logprobs_T is not None:
            ref_S = _sums(rows.ref_logprobs_T[pack.source_R], pack.sequence_R, count)
        return Responses(
            logprobs_S=_sums(logprobs_R, pack.sequence_R, count),
            lengths_S=pack.responses_N,
            ref_logprobs_S=ref_S,
            labels_S=None if rows.labels_S is None else rows.labels_S[pack.rows_N],
            kl_baseline=self._kl_baseline,
        )

    def reduce(self, parts: list[Rows]) -> dict[str, float]:
        """Metrics of the update, the same on every rank; collective."""
        replicas = parallel_state.get_data_parallel_world_size()
        tokens = torch.tensor(float(sum(rows.tokens for rows in parts)))
        self._metrics.add("tokens", tokens, 1 / replicas)
        self._metrics.add("response_length_mean", tokens, sum(rows.responses for rows in parts))
        kinds = self._loss.kinds or ()
        found = self._metrics.reduce(perhaps=kinds)  # a step may have no response of a kind
        if kinds and found.keys() >= {*kinds}:
            good, bad = kinds
            found["reward_margin"] = found[good] - found[bad]
        return found


def _sums(values_R: Tensor, sequence_R: Tensor, count: int) -> Tensor:
    """``[count]`` the sum over each sequence's tokens."""
    return values_R.new_zeros(count).index_add(0, sequence_R, values_R)
