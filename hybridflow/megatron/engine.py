"""The training engine of one role: a Megatron model on this group of ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.utils import get_model_config
from torch import Tensor

from hybridflow.algorithms.packing import Pack, pack_rows
from hybridflow.batch import Batch, Ragged
from hybridflow.megatron import checkpoint, memory
from hybridflow.megatron.config import (
    EngineConfig,
    LossSettings,
    OptimizerSettings,
    ValueLossSettings,
)
from hybridflow.megatron.full_kl import ReferenceHead
from hybridflow.megatron.head import VALUE, VOCABULARY, exported_head, model_config
from hybridflow.megatron.lockstep import in_lockstep
from hybridflow.megatron.loss import update_loss
from hybridflow.megatron.optimizer import ModelOptimizer
from hybridflow.megatron.passes import PassSettings, look, train
from hybridflow.megatron.ranks import is_reporter, join
from hybridflow.megatron.reward_loss import ScoreUpdateLoss, check_pairs, pair_rows
from hybridflow.megatron.rows import check_fields, mini_batches, rows_of
from hybridflow.megatron.step import PackedModel
from hybridflow.megatron.value_loss import ValueUpdateLoss, check_value_fields, value_rows
from megatron_bridge import live
from megatron_bridge.engine_files import PARAMETERS
from megatron_bridge.registry import has_score_bias

_UNTRAINABLE = "this engine was made without an optimizer; it cannot train"


class Engine:
    """Log-probabilities, updates, weights and checkpoints of one model.

    torch.distributed must be up with ``config.layout.world`` ranks. All methods are collective:
    every rank calls them alike, with its data-parallel part of a batch.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._hf_config, fresh_head = model_config(config.model_path, config.head)
        join(config)
        model = live.build_model(
            self._hf_config, config.layout, dtype=config.dtype, seed=config.seed
        )
        live.load_weights(model, config.model_path, fresh_head=fresh_head)
        self._core: Any = model
        self._reference_head: ReferenceHead | None = None
        self._keep_reference_head()
        self._released = 0
        self._optimizer: ModelOptimizer | None = None
        if config.optimizer is not None:
            model = _data_parallel(model)
        self._model = model
        self._packed = PackedModel(model)
        if config.optimizer is not None:
            self.begin_stage(config.optimizer)

    def _keep_reference_head(self) -> None:
        if self.config.keep_reference_head and self._core.post_process:
            self._reference_head = ReferenceHead(self._core, self._hf_config["vocab_size"])

    def switch_to_rollout(self) -> memory.Memory:
        """Give up the memory that training alone needs, for a rollout on the same device.

        The next method that computes takes it back; calling it again does nothing.
        """
        if not self._released:
            self._released = max(1, memory.release(self._model, self._optimizer))
        return memory.measure(self._released)

    def switch_to_training(self) -> None:
        """Undo ``switch_to_rollout``: the same weights and optimizer state."""
        if self._released:
            memory.restore(self._model, self._optimizer)
            self._released = 0

    def begin_stage(self, optimizer: OptimizerSettings) -> None:
        """New optimizer state and a learning-rate schedule from its start, same weights."""
        if not isinstance(self._model, DistributedDataParallel):
            raise ValueError(_UNTRAINABLE)
        self.switch_to_training()
        self._optimizer = None  # its state goes before the next one's is made
        self._optimizer = ModelOptimizer(self._model, optimizer)

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Ragged | None:
        """Log-probability of every response token, float32, in nats.

        Args:
            batch: this data-parallel rank's rows, with ``prompts`` and ``responses``.

        Returns:
            Rows like the responses, on the CPU; None but on the last pipeline stage's first
            tensor-parallel rank.
        """
        self._require_head(VOCABULARY)
        return self._of_tokens(batch, temperature)

    def values(self, batch: Batch) -> Ragged | None:
        """Value of the state before every response token, float32; otherwise as ``logprobs``.

        The last token before a response token is the one whose hidden state is read: the prompt's
        last one for the first.
        """
        self._require_head(VALUE)
        return self._of_tokens(batch)

    def _of_tokens(self, batch: Batch, temperature: float = 1.0) -> Ragged | None:
        """One number per response token, from the position that predicts it."""
        self.switch_to_training()
        packs = self._packs(batch)
        return _by_token(batch, packs, self._packed.infer(packs, temperature), torch.float32)

    def _packs(self, batch: Batch) -> list[Pack]:
        packs = pack_rows(
            batch["prompts"],
            batch["responses"],
            self.config.micro_batch_tokens,
            share_prompts=self._packed.shares_prompts,
        )
        return in_lockstep([packs], self.config.layout)[0]

    def hidden(self, batch: Batch) -> Ragged | None:
        """Final hidden state of the model before every response token: ``[H]`` values a token.

        Args, Returns: as ``logprobs``, in the model's type.
        """
        self.switch_to_training()
        packs = self._packs(batch)
        width = self._hf_config["hidden_size"]
        return _by_token(batch, packs, self._packed.hidden(packs), self.config.dtype, width)

    def update(self, batch: Batch, loss: LossSettings) -> dict[str, float]:
        """``loss.epochs`` passes of ``loss.mini_batches`` optimizer steps over the batch.

        Args:
            batch: this data-parallel rank's rows: ``prompts``, ``responses``, and as the loss
                needs ``advantages`` (one a sample, or one a response token), ``old_logprobs``
                (without them the weights are taken to be those that sampled), ``ref_logprobs``,
                ``rollout_logprobs`` and ``sample_mask`` (bool, False: the response takes no part).
                Mini-batch k takes the k-th run of prompts of each rank.

        Returns:
            Metrics, the same on every rank.

        A mini-batch that has no token left to learn from, on any rank, takes no step:
        ``skipped_steps`` counts them.

        Raises:
            ValueError: a field is missing, or a rank has no response in some mini-batch.
            Disagreement: rollout, old policy and trainer are not one policy before the first step
                (``agreement_bound``, ``old_bound``); no parameter has moved.
            FloatingPointError: loss or gradient is not finite; names the optimizer step.
        """
        self._require_head(VOCABULARY)
        check_fields(batch, loss)
        parts = mini_batches(batch, loss, *self._packing())
        measured = update_loss(loss, batch, self._packed.device, self._reference_head)
        return self._train(parts, measured, loss)

    def update_values(self, batch: Batch, loss: ValueLossSettings) -> dict[str, float]:
        """``update`` of a critic.

        Args:
            batch: this data-parallel rank's rows: ``prompts``, ``responses``, ``returns`` and, as
                the loss needs, ``values`` from before the update, one of each a response token.
        """
        self._require_head(VALUE)
        check_value_fields(batch, loss)
        parts = [
            value_rows(part, loss, *self._packing()) for part in batch.split(loss.mini_batches)
        ]
        return self._train(parts, ValueUpdateLoss(loss, self._packed.device), loss)

    def update_scores(self, batch: Batch, loss: ValueLossSettings) -> dict[str, float]:
        """``update`` of a reward model.

        Args:
            batch: this data-parallel rank's pairs: ``prompts``, ``responses`` with one more token
                each, before which the last value stands, and perhaps ``margins``.
        """
        self._require_head(VALUE)
        check_pairs(batch, loss)
        parts = [pair_rows(part, loss, *self._packing()) for part in batch.split(loss.mini_batches)]
        return self._train(parts, ScoreUpdateLoss(loss, self._packed.device), loss)

    def evaluate_scores(self, batch: Batch, loss: ValueLossSettings) -> dict[str, float]:
        """The loss of a reward model on pairs and what it measures, without a step."""
        self._require_head(VALUE)
        check_pairs(batch, loss)
        rows = pair_rows(batch, loss, *self._packing())
        return self._look(rows, ScoreUpdateLoss(loss, self._packed.device), loss)

    def _train(self, parts: list[Any], measured: Any, loss: PassSettings) -> dict[str, float]:
        return train(self._packed, self._trainer(), self.config.layout, parts, measured, loss)

    def _look(self, rows: Any, measured: Any, loss: PassSettings) -> dict[str, float]:
        self.switch_to_training()
        return look(self._packed, self.config.layout, rows, measured, loss.temperature)

    def evaluate(self, batch: Batch, loss: LossSettings) -> dict[str, float]:
        """The loss on the batch and what it measures, without a step.

        Args:
            batch: this data-parallel rank's rows, as ``update`` takes them; there may be none.

        Returns:
            Metrics, the same on every rank.
        """
        self._require_head(VOCABULARY)
        check_fields(batch, loss)
        rows = rows_of(batch, loss, *self._packing())
        measured = update_loss(loss, batch, self._packed.device, self._reference_head)
        return self._look(rows, measured, loss)

    def _packing(self) -> tuple[int, bool]:
        """Most tokens of a pack, and whether its responses may share a prompt."""
        return self.config.micro_batch_tokens, self._packed.shares_prompts

    def _require_head(self, head: str) -> None:
        if self.config.head != head:
            raise ValueError(f"this model ends in the {self.config.head}, not in the {head}")

    def _trainer(self) -> ModelOptimizer:
        self.switch_to_training()
        if self._optimizer is None:
            raise ValueError(_UNTRAINABLE)
        return self._optimizer

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full HuggingFace tensors by name, on rank 0; every rank must exhaust the iterator."""
        self.switch_to_training()
        return live.export_weights(self._core, self._hf_config)

    def local_weights(self) -> dict[int, Tensor]:
        """This rank's live tensors by their weight's number in the bridge's table."""
        return live.local_weights(self._core)

    def load_pretrained(self, folder: str | Path) -> None:
        """Takes over the weights of a HuggingFace folder of the same model, and its output head as
        the reference's. An optimizer starts from them with ``begin_stage``."""
        self.switch_to_training()
        live.load_weights(self._core, folder)
        self._keep_reference_head()

    def not_finite(self) -> str:
        """A parameter of this rank that holds NaN or infinity; empty where none does."""
        named = self._core.named_parameters()
        return next((name for name, p in named if not bool(p.data.isfinite().all())), "")

    @property
    def pad_token_id(self) -> int | None:
        """What the model's config calls padding; None: nothing."""
        return self._hf_config.get("pad_token_id")

    def save_pretrained(self, folder: str | Path, *, by_token: bool = False) -> None:
        """Writes the model in HuggingFace format, with the source's tokenizer; ``by_token``: its
        scores are of tokens, so as a ``*ForTokenClassification``."""
        self.switch_to_training()
        changes = exported_head(self._hf_config, by_token)
        live.save_pretrained(self._core, self.config.model_path, folder, changes=changes)

    def save_checkpoint(self, folder: str | Path) -> None:
        """Writes weights, optimizer state and counters, whole or not at all."""
        optimizer = self._trainer()
        checkpoint.save(
            Path(folder),
            self.config.layout,
            {**self._parameters(), **optimizer.state()},
            {
                "optimizer_steps": optimizer.steps,
                "dtype": str(self.config.dtype),
                "model": str(Path(self.config.model_path).resolve()),
                "head": self.config.head,
                "score_bias": has_score_bias(self._hf_config),
            },
            self._experts(),
        )

    def load_checkpoint(self, folder: str | Path) -> None:
        """Goes on from ``save_checkpoint``, bit for bit.

        Call ``begin_stage`` with the stage's optimizer first: settings are the recipe's, state is
        the checkpoint's.

        Raises:
            ValueError: the checkpoint is of another layout, model or dtype.
        """
        optimizer = self._trainer()
        tensors, scalars = checkpoint.load(Path(folder), self.config.layout, self._experts())
        if scalars["dtype"] != str(self.config.dtype):
            raise ValueError(
                f"{folder} was saved in {scalars['dtype']}, this run is in {self.config.dtype}; "
                "set model.dtype as it was"
            )
        parameters = self._parameters()
        checkpoint.fill(parameters, {n: t for n, t in tensors.items() if n.startswith(PARAMETERS)})
        optimizer.load_state(
            {n: t for n, t in tensors.items() if not n.startswith(PARAMETERS)},
            scalars["optimizer_steps"],
        )

    def _experts(self) -> frozenset[str]:
        """Names of the parameters that Megatron places by the experts' coordinates."""
        return frozenset(
            name for name, p in self._core.named_parameters() if not getattr(p, "allreduce", True)
        )

    def _parameters(self) -> dict[str, Tensor]:
        return {f"{PARAMETERS}{name}": p.data for name, p in self._core.named_parameters()}


def _by_token(
    batch: Batch, packs: list[Pack], results: list[Tensor], dtype: torch.dtype, *width: int
) -> Ragged | None:
    """What each pack gave, by response token; None where another rank reports it."""
    if not is_reporter():
        return None
    responses: Ragged = batch["responses"]
    flat = torch.zeros(len(responses.values), *width, dtype=dtype)
    for pack, result in zip(packs, results, strict=True):
        flat[pack.source_R] = result.cpu()
    return responses.with_values(flat)


def _data_parallel(model: torch.nn.Module) -> DistributedDataParallel:
    config = get_model_config(model)
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(config, settings, model)
