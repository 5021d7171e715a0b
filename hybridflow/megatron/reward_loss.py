"""The update of a reward model on pairs: what it reads of a mini-batch, and its loss."""

from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from torch import Tensor

from hybridflow.algorithms.losses.reward_model import METRICS, SCORE_LOSSES, bradley_terry
from hybridflow.algorithms.packing import Pack, pack_rows
from hybridflow.batch import Batch, Ragged
from hybridflow.megatron.config import ValueLossSettings
from hybridflow.megatron.metrics import Measured, TokenMetrics
from hybridflow.megatron.step import PackLoss


@dataclass(frozen=True)
class PairRows:
    """Packs of whole pairs. Each response has one token more than its own, before which its last
    value stands.

    Attributes:
        normaliser: number of pairs.
        tokens: of the responses themselves.
        margins_P: of each pair; None: none.
    """

    packs: list[Pack]
    normaliser: float
    tokens: int
    margins_P: Tensor | None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to learn from."""
        return self.normaliser == 0

    def to(self, device: torch.device) -> "PairRows":
        """The same rows, margins on ``device``; packs follow when they are run."""
        margins = None if self.margins_P is None else self.margins_P.to(device)
        return replace(self, margins_P=margins)


def pair_rows(
    batch: Batch, loss: ValueLossSettings, max_tokens: int, share_prompts: bool
) -> PairRows:
    """What one optimizer step reads of this rank's part of a mini-batch."""
    responses: Ragged = batch["responses"]
    return PairRows(
        packs=pack_rows(
            batch["prompts"],
            responses,
            max_tokens,
            share_prompts=share_prompts,
            whole_groups=True,
        ),
        normaliser=float(batch.prompts),
        tokens=len(responses.values) - len(responses),
        margins_P=batch["margins"].float() if "margins" in batch else None,
    )


def check_pairs(batch: Batch, loss: ValueLossSettings) -> None:
    """ValueError when the batch has no two responses to a prompt, or an empty one."""
    if batch.samples_per_prompt != 2:
        raise ValueError(
            f"loss '{loss.name}' takes two responses to a prompt, the chosen and the rejected; "
            f"there are {batch.samples_per_prompt}"
        )
    if bool((batch["responses"].lengths < 2).any()):
        raise ValueError(f"loss '{loss.name}': a response is empty; it needs one token or more")


class ScoreUpdateLoss(Measured):
    """As ``ValueUpdateLoss``, of pairs."""

    def __init__(self, settings: ValueLossSettings, device: torch.device) -> None:
        self._of_tokens, self._device = SCORE_LOSSES[settings.name], device
        self._metrics = TokenMetrics(["loss", "tokens", *METRICS], [], device)

    def of(self, rows: PairRows, normaliser: float, first: bool) -> PackLoss:
        """The loss of a pack of ``rows``; ``normaliser``: over all data-parallel ranks."""
        rows = rows.to(self._device)
        # The data-parallel wrapper averages gradients over its ranks; the loss is a sum over them.
        scale = parallel_state.get_data_parallel_world_size() / normaliser

        def pack_loss(pack: Pack, values_R: Tensor) -> Tensor:
            pairs_N = pack.rows_N[::2] // 2
            margins_N = None if rows.margins_P is None else rows.margins_P[pairs_N]
            found = bradley_terry(self._scores(pack, values_R), margins_N)
            total = found.loss_N.sum()
            self._metrics.add("loss", total, len(found.loss_N))
            for name, values in found.metrics.items():
                self._metrics.add(name, values)
            return total * scale

        return pack_loss

    def _scores(self, pack: Pack, values_R: Tensor) -> Tensor:
        """``[S]``: the value after a response's last token, or the mean after each of its tokens.

        The first value of a response stands after its prompt, and is none of its own.
        """
        ends_S = pack.responses_N.cumsum(0)
        if not self._of_tokens:
            return values_R[ends_S - 1]
        sums_S = values_R.new_zeros(len(ends_S)).index_add(0, pack.sequence_R, values_R)
        first_S = values_R[ends_S - pack.responses_N]
        return (sums_S - first_S) / (pack.responses_N - 1)

    def reduce(self, parts: list[PairRows]) -> dict[str, float]:
        """Metrics of the update, the same on every rank; collective."""
        replicas = parallel_state.get_data_parallel_world_size()
        tokens = torch.tensor(float(sum(rows.tokens for rows in parts)))
        self._metrics.add("tokens", tokens, 1 / replicas)
        return self._metrics.reduce()
