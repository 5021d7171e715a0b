"""One mini-batch of this data-parallel rank, flat over its response tokens."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.algorithms import LOSSES
from hybridflow.algorithms.aggregation import token_weights
from hybridflow.algorithms.packing import Pack, pack_rows
from hybridflow.batch import Batch, Ragged
from hybridflow.megatron.config import LossSettings
from hybridflow.recipe.axes import Axis

LOGPROBS = ("old_logprobs", "ref_logprobs")


@dataclass(frozen=True)
class Rows:
    """Packs and what the loss reads, ``T`` response tokens in the batch's order.

    Attributes:
        weights_T: of the aggregation; ``normaliser`` is these rows' share.
        responses: number of rows with at least one response token.
    """

    packs: list[Pack]
    weights_T: Tensor
    normaliser: float
    responses: int
    advantages_T: Tensor | None
    old_logprobs_T: Tensor | None
    ref_logprobs_T: Tensor | None

    @property
    def tokens(self) -> int:
        """Number of response tokens."""
        return len(self.weights_T)

    def to(self, device: torch.device) -> "Rows":
        """The same rows, flat fields on ``device``; packs follow when they are run."""
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def rows_of(batch: Batch, loss: LossSettings, max_tokens: int, share_prompts: bool) -> Rows:
    """What one optimizer step reads of this rank's part of a mini-batch."""
    responses: Ragged = batch["responses"]
    weights_T, normaliser = token_weights(loss.aggregation, responses.lengths, loss.loss_divisor)
    flat = {name: batch[name].values.float() if name in batch else None for name in LOGPROBS}
    return Rows(
        packs=pack_rows(batch["prompts"], responses, max_tokens, share_prompts=share_prompts),
        weights_T=weights_T,
        normaliser=normaliser,
        responses=int((responses.lengths > 0).sum()),
        advantages_T=_advantages(batch, responses) if "advantages" in batch else None,
        old_logprobs_T=flat["old_logprobs"],
        ref_logprobs_T=flat["ref_logprobs"],
    )


def check_fields(batch: Batch, loss: LossSettings) -> None:
    """ValueError when ``loss`` is unknown or needs a field that ``batch`` lacks."""
    if loss.name not in LOSSES:
        raise ValueError(LOSSES.unknown(loss.name))
    if loss.agreement_bound is not None and "rollout_logprobs" not in batch:
        raise ValueError(
            "algorithm.agreement.bound needs the field 'rollout_logprobs': add it to the inputs "
            "of the update"
        )
    entry = LOSSES[loss.name]
    if entry.needs_advantages and "advantages" not in batch:
        raise ValueError(f"loss '{loss.name}' needs the field 'advantages'")
    if entry.whole_sequences and batch.axes["advantages"] is Axis.TOKENS:
        raise ValueError(
            f"loss '{loss.name}' takes one advantage per response, but 'advantages' has one per "
            "token; use gspo_token, or a loss of single tokens such as ppo_clip"
        )
    if entry.compares_policies and not loss.on_policy and "old_logprobs" not in batch:
        raise ValueError(
            f"{loss.mini_batches} mini-batches x {loss.epochs} epochs need the field "
            "'old_logprobs': after the first optimizer step the weights have moved"
        )


def _advantages(batch: Batch, responses: Ragged) -> Tensor:
    if batch.axes["advantages"] is Axis.TOKENS:
        return batch["advantages"].values.float()
    return torch.repeat_interleave(batch["advantages"].float(), responses.lengths)
