"""One mini-batch of this data-parallel rank, flat over its response tokens."""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms import LOSSES, PREFERENCES
from hybridflow.algorithms.aggregation import token_weights
from hybridflow.algorithms.correction import Correction, correct
from hybridflow.algorithms.losses import Sequences
from hybridflow.algorithms.packing import Pack, pack_rows
from hybridflow.batch import Batch, Ragged
from hybridflow.megatron.config import LossSettings
from hybridflow.ragged import spread_over
from hybridflow.recipe.axes import Axis

FULL_KL = "full"
"""The KL over the whole vocabulary, in place of an estimate from the sampled tokens."""
LOGPROBS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")


@dataclass(frozen=True)
class Rows:
    """Packs and what the loss reads, ``T`` response tokens in the batch's order.

    Attributes:
        weights_T: of the aggregation; ``normaliser`` is these rows' share.
        tokens, responses: number of response tokens that take part in the loss, and of rows with
            one or more of them.
        empty: whether no row has a response token at all, masked or not.
        ref_hidden: the reference's final hidden states; they stay where they are, each pack takes
            its own.
        correction: of the mismatch between trainer and rollout; None: none.
        labels_S: bool, whether each response is desirable.
        start: response tokens of the rank's whole batch that come before these rows.
    """

    packs: list[Pack]
    weights_T: Tensor
    normaliser: float
    tokens: int
    responses: int
    empty: bool
    advantages_T: Tensor | None
    old_logprobs_T: Tensor | None
    ref_logprobs_T: Tensor | None
    ref_hidden: Ragged | None
    rollout_logprobs_T: Tensor | None
    correction: Correction | None
    labels_S: Tensor | None = None
    start: int = 0

    def to(self, device: torch.device) -> "Rows":
        """The same rows, flat fields on ``device``; packs follow when they are run."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        if self.correction is not None:
            fields = {name: value.to(device) for name, value in vars(self.correction).items()}
            moved["correction"] = Correction(**fields)
        return replace(self, **moved)


def mini_batches(
    batch: Batch, loss: LossSettings, max_tokens: int, share_prompts: bool
) -> list[Rows]:
    """The rows of each optimizer step of a pass over the batch, in order."""
    found: list[Rows] = []
    start = 0
    for part in batch.split(loss.mini_batches):
        found.append(replace(rows_of(part, loss, max_tokens, share_prompts), start=start))
        start += len(part["responses"].values)
    return found


def rows_of(batch: Batch, loss: LossSettings, max_tokens: int, share_prompts: bool) -> Rows:
    """What one optimizer step reads of this rank's part of a mini-batch."""
    responses: Ragged = batch["responses"]
    lengths_S = responses.lengths
    correction = _correction(batch, loss, responses)
    kept_T = _kept(batch, responses, correction)
    weights_T, normaliser = token_weights(loss.aggregation, lengths_S, loss.loss_divisor, kept_T)
    left_S = lengths_S if kept_T is None else Sequences.of(responses).counts(kept_T)
    pairs = loss.name in PREFERENCES and PREFERENCES[loss.name].pairs
    if pairs:  # of which one response takes no part, the other has nothing to be compared with
        left_S = left_S * (left_S.view(-1, 2) > 0).all(dim=1).repeat_interleave(2)
    responses_left = int((left_S > 0).sum())
    if loss.name in PREFERENCES:
        normaliser = responses_left / (2 if pairs else 1)
    flat = {name: batch[name].values.float() if name in batch else None for name in LOGPROBS}
    return Rows(
        packs=pack_rows(
            batch["prompts"],
            responses,
            max_tokens,
            share_prompts=share_prompts,
            kept_S=left_S > 0,
            whole_groups=pairs,
            trained_T=batch["response_mask"].values if "response_mask" in batch else None,
        ),
        weights_T=weights_T,
        normaliser=normaliser,
        tokens=int(left_S.sum()),
        responses=responses_left,
        empty=not len(responses.values),
        advantages_T=_advantages(batch, responses) if "advantages" in batch else None,
        old_logprobs_T=flat["old_logprobs"],
        ref_logprobs_T=flat["ref_logprobs"],
        ref_hidden=batch.fields.get("ref_hidden"),
        rollout_logprobs_T=flat["rollout_logprobs"],
        correction=correction,
        labels_S=batch.fields.get("labels"),
    )


def check_fields(batch: Batch, loss: LossSettings) -> None:
    """ValueError when ``loss`` is unknown or needs a field that ``batch`` lacks."""
    if loss.name in PREFERENCES:
        _check_preference(batch, loss)
    elif loss.name in LOSSES:
        _check_token_loss(batch, loss)
    else:
        raise ValueError(LOSSES.unknown(loss.name))


def _check_token_loss(batch: Batch, loss: LossSettings) -> None:
    for setting, fields in _needs(loss).items():
        for field in fields:
            if field not in batch:
                raise ValueError(
                    f"{setting} needs the field '{field}': add it to the inputs of the update"
                )
    _check_masks(batch)
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


def _check_preference(batch: Batch, loss: LossSettings) -> None:
    entry = PREFERENCES[loss.name]
    if missing := [field for field in entry.needs if field not in batch]:
        raise ValueError(f"loss '{loss.name}' needs the field '{missing[0]}'")
    if entry.pairs and batch.samples_per_prompt != 2:
        raise ValueError(
            f"loss '{loss.name}' takes two responses to a prompt, the chosen and the rejected; "
            f"there are {batch.samples_per_prompt}"
        )
    _check_masks(batch)
    lengths_S = batch["responses"].lengths
    if bool((lengths_S == 0).any()):
        row = int((lengths_S == 0).nonzero()[0])
        raise ValueError(f"loss '{loss.name}': response {row} is empty; it needs one token or more")


def _check_masks(batch: Batch) -> None:
    for name in ("sample_mask", "response_mask"):
        if name not in batch:
            continue
        data = batch[name]
        values = data.values if isinstance(data, Ragged) else data
        if values.dtype is not torch.bool:
            told = str(values.dtype).removeprefix("torch.")
            raise ValueError(
                f"'{name}' is a mask of {told}; it is bool: compare, such as `{name} != 0`"
            )


def _needs(loss: LossSettings) -> dict[str, tuple[str, ...]]:
    """Fields that settings of the recipe need, by the setting's key."""
    found: dict[str, tuple[str, ...]] = {}
    if loss.agreement_bound is not None:
        found["algorithm.agreement.bound"] = ("rollout_logprobs",)
    if loss.correction is not None:
        found["algorithm.rollout_correction"] = ("rollout_logprobs", "old_logprobs")
    if loss.off_policy_bound is not None:
        found["algorithm.off_policy_mask"] = ("rollout_logprobs", "advantages")
    if loss.kl_estimator == FULL_KL and loss.kl_coef:
        found["algorithm.kl.estimator=full"] = ("ref_hidden",)
    return found


def _correction(batch: Batch, loss: LossSettings, responses: Ragged) -> Correction | None:
    told = loss.correction
    if told is None:
        return None
    return correct(
        batch["old_logprobs"].values.float(),
        batch["rollout_logprobs"].values.float(),
        Sequences.of(responses),
        **vars(told),
    )


def _kept(batch: Batch, responses: Ragged, correction: Correction | None) -> Tensor | None:
    """``[T]`` bool: tokens that take part in the loss; None: all."""
    masks: list[Tensor] = []
    if "sample_mask" in batch:
        masks.append(spread_over(batch["sample_mask"], responses.lengths))
    if "response_mask" in batch:
        masks.append(batch["response_mask"].values)
    if correction is not None:
        masks.append(correction.kept_T)
    return reduce(torch.logical_and, masks) if masks else None


def _advantages(batch: Batch, responses: Ragged) -> Tensor:
    if batch.axes["advantages"] is Axis.TOKENS:
        return batch["advantages"].values.float()
    return spread_over(batch["advantages"].float(), responses.lengths)
