"""The update of a critic: what it reads of a mini-batch, its loss, and what it measures."""

from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from torch import Tensor

from hybridflow.algorithms.aggregation import token_weights, weighted_sum
from hybridflow.algorithms.packing import Pack, pack_rows
from hybridflow.algorithms.values import VALUE_LOSSES, ValueInputs
from hybridflow.batch import Batch, Ragged
from hybridflow.megatron.config import ValueLossSettings
from hybridflow.megatron.metrics import Measured, TokenMetrics
from hybridflow.megatron.step import PackLoss


@dataclass(frozen=True)
class ValueRows:
    """Packs and what a value loss reads, ``T`` response tokens in the batch's order.

    Attributes:
        weights_T: of the aggregation; ``normaliser`` is these rows' share.
        responses: number of rows with at least one response token.
    """

    packs: list[Pack]
    weights_T: Tensor
    normaliser: float
    responses: int
    returns_T: Tensor
    old_values_T: Tensor | None

    @property
    def tokens(self) -> int:
        """Number of response tokens."""
        return len(self.weights_T)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to learn from."""
        return self.responses == 0

    def to(self, device: torch.device) -> "ValueRows":
        """The same rows, flat fields on ``device``; packs follow when they are run."""
        moved = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def value_rows(
    batch: Batch, loss: ValueLossSettings, max_tokens: int, share_prompts: bool
) -> ValueRows:
    """What one optimizer step reads of this rank's part of a mini-batch."""
    responses: Ragged = batch["responses"]
    weights_T, normaliser = token_weights(loss.aggregation, responses.lengths)
    return ValueRows(
        packs=pack_rows(batch["prompts"], responses, max_tokens, share_prompts=share_prompts),
        weights_T=weights_T,
        normaliser=normaliser,
        responses=int((responses.lengths > 0).sum()),
        returns_T=batch["returns"].values.float(),
        old_values_T=batch["values"].values.float() if "values" in batch else None,
    )


def check_value_fields(batch: Batch, loss: ValueLossSettings) -> None:
    """ValueError when ``loss`` is unknown or needs a field that ``batch`` lacks."""
    if loss.name not in VALUE_LOSSES:
        raise ValueError(VALUE_LOSSES.unknown(loss.name))
    needed = ["returns", "values"] if VALUE_LOSSES[loss.name].needs_old_values else ["returns"]
    for name in needed:
        if name not in batch:
            raise ValueError(f"loss '{loss.name}' needs the field '{name}'")


class ValueUpdateLoss(Measured):
    """Makes the loss of each mini-batch and gathers the metrics of the whole update."""

    def __init__(self, settings: ValueLossSettings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._loss = VALUE_LOSSES[settings.name]
        self._metrics = TokenMetrics(["loss", "tokens", *self._loss.metrics], [], device)

    def of(self, rows: ValueRows, normaliser: float, first: bool) -> PackLoss:
        """The loss of a pack of ``rows``; ``normaliser``: over all data-parallel ranks."""
        rows = rows.to(self._device)
        # The data-parallel wrapper averages gradients over its ranks; the loss is a sum over them.
        scale = parallel_state.get_data_parallel_world_size() / normaliser

        def pack_loss(pack: Pack, values_R: Tensor) -> Tensor:
            old = rows.old_values_T
            token_loss = self._loss(
                ValueInputs(
                    values_T=values_R,
                    returns_T=rows.returns_T[pack.source_R],
                    old_values_T=None if old is None else old[pack.source_R],
                    clip=self._settings.clip,
                )
            )
            weighted = weighted_sum(rows.weights_T, token_loss.loss_T, pack.source_R)
            self._metrics.add("loss", weighted, rows.normaliser / len(rows.packs))
            self._metrics.add_sums(token_loss.sums, len(pack.source_R))
            return weighted * scale

        return pack_loss

    def reduce(self, parts: list[ValueRows]) -> dict[str, float]:
        """Metrics of the update, the same on every rank; collective."""
        replicas = parallel_state.get_data_parallel_world_size()
        tokens = torch.tensor(float(sum(rows.tokens for rows in parts)))
        self._metrics.add("tokens", tokens, 1 / replicas)
        return self._metrics.reduce()
