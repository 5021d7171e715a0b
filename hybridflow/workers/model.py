"""One rank of a model role: the actor, a frozen reference, a critic."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridflow import owned
from hybridflow.batch import Batch, Ragged
from hybridflow.cluster.host import this_node
from hybridflow.cluster.transfer import DATA_PARALLEL, GATHER, MINI_BATCHES, ONE_TO_ALL, transfer
from hybridflow.recipe.axes import Axis
from megatron_bridge.reshard import Seat

if TYPE_CHECKING:
    from hybridflow.megatron.config import (
        EngineConfig,
        LossSettings,
        OptimizerSettings,
        ValueLossSettings,
    )
    from hybridflow.megatron.memory import Memory
    from hybridflow.recipe.own_code import OwnModule
    from hybridflow.weight_sync.transports import Outbox
    from hybridflow.weight_sync.wiring import Wiring

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


class ModelWorker:
    """Holds an engine; methods are collective over the role's ranks.

    The engine's packages are imported here, in the worker's process: the driver needs none; so are
    the user's own modules, ``imports``, whose losses an update may name.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        rendezvous: tuple[str, int],
        *,
        engine: EngineConfig,
        imports: Sequence[OwnModule] = (),
    ) -> None:
        with _setting_up:
            for module in imports:
                module.load()
            _enter_process_group(rank, world, rendezvous)
            from hybridflow.megatron.engine import Engine

            try:
                self._engine = Engine(engine)
            except BaseException:
                _leave_process_group()
                raise
        self._rank = rank
        self._folder: Path | None = None
        self._outbox: Outbox | None = None

    @transfer(DATA_PARALLEL)
    def logprobs(self, batch: Batch, temperature: float) -> Batch | None:
        """Log-probabilities (tokens, float) of the responses at ``temperature``."""
        with _computing:
            logprobs_T = self._engine.logprobs(batch, temperature)
        if logprobs_T is None:
            return None
        return Batch(
            {"logprobs": logprobs_T},
            {"logprobs": Axis.TOKENS},
            batch.prompts,
            batch.samples_per_prompt,
        )

    @transfer(DATA_PARALLEL)
    def hidden(self, batch: Batch) -> Batch | None:
        """The final hidden state (tokens, vectors) before every response token."""
        with _computing:
            hidden = self._engine.hidden(batch)
        if hidden is None:
            return None
        axes = {"hidden": Axis.TOKENS}
        return Batch({"hidden": hidden}, axes, batch.prompts, batch.samples_per_prompt)

    @transfer(DATA_PARALLEL)
    def values(self, batch: Batch) -> Batch | None:
        """Values (tokens, float) of the states before the responses' tokens."""
        with _computing:
            values_T = self._engine.values(batch)
        if values_T is None:
            return None
        return Batch(
            {"values": values_T},
            {"values": Axis.TOKENS},
            batch.prompts,
            batch.samples_per_prompt,
        )

    @transfer(DATA_PARALLEL)
    def score(self, batch: Batch, pooling: str = "last") -> Batch | None:
        """rewards (samples, float32): of each response, by one of the ways of ``pooled``."""
        scored = self.values(with_next_token(batch))
        if scored is None:
            return None
        pad = self._engine.pad_token_id
        rewards_S = pooled(scored["values"], pooling, batch["responses"], pad)
        if not rewards_S.isfinite().all():
            sample = int((~rewards_S.isfinite()).nonzero()[0])
            raise ValueError(
                f"the reward model gives {rewards_S[sample].item()} for sample {sample} of its "
                "share; a reward is finite: look at its checkpoint, or use float32"
            )
        return Batch(
            {"rewards": rewards_S},
            {"rewards": Axis.SAMPLES},
            batch.prompts,
            batch.samples_per_prompt,
        )

    @transfer(MINI_BATCHES)
    def update(self, batch: Batch, loss: LossSettings) -> dict[str, float]:
        """The optimizer steps of one training step; the same metrics on every rank."""
        with _computing:
            return self._engine.update(batch, loss)

    @transfer(DATA_PARALLEL)
    def evaluate(self, batch: Batch, loss: LossSettings) -> dict[str, float]:
        """The loss and its metrics without a step; the same on every rank."""
        with _computing:
            return self._engine.evaluate(batch, loss)

    @transfer(MINI_BATCHES)
    def update_values(self, batch: Batch, loss: ValueLossSettings) -> dict[str, float]:
        """``update`` of a critic."""
        with _computing:
            return self._engine.update_values(batch, loss)

    @transfer(MINI_BATCHES)
    def update_scores(self, batch: Batch, loss: ValueLossSettings) -> dict[str, float]:
        """``update`` of a reward model on pairs."""
        with _computing:
            return self._engine.update_scores(with_margins(batch), loss)

    @transfer(DATA_PARALLEL)
    def evaluate_scores(self, batch: Batch, loss: ValueLossSettings) -> dict[str, float]:
        """The loss of a reward model on pairs, without a step."""
        with _computing:
            return self._engine.evaluate_scores(with_margins(batch), loss)

    @transfer(ONE_TO_ALL)
    def begin_stage(self, optimizer: OptimizerSettings) -> None:
        """A fresh optimizer and learning-rate schedule for the next stage."""
        self._engine.begin_stage(optimizer)

    @transfer(GATHER)
    def device_name(self) -> str:
        """What this rank computes on, as its maker calls it."""
        from megatron_bridge.runtime import device

        return device.name()

    @transfer(GATHER)
    def seat(self) -> Seat:
        """Where this rank runs."""
        from megatron_bridge.runtime import device

        return Seat(this_node().id, device.index())

    @transfer(ONE_TO_ALL)
    def connect(self, wiring: Wiring) -> None:
        """Make ready to publish to the engines that ``wiring`` names."""
        from hybridflow.weight_sync.folders import memory, own_folder
        from hybridflow.weight_sync.transports import make_outbox

        self._close_outbox()
        if self._folder is None:
            self._folder = own_folder(memory())
        self._outbox = make_outbox(wiring, self._rank, self._engine, self._folder)

    @transfer(GATHER)
    def send(self, endpoints: Mapping[int, Any], version: int) -> Any:
        """Send this rank's part of the weights to the engines; what it says it sent."""
        assert self._outbox is not None, "connect comes first"
        with _computing:
            self._engine.switch_to_training()
            return self._outbox.send(endpoints, version)

    @transfer(GATHER)
    def switch_to_rollout(self) -> Memory:
        """Give up the memory that training alone needs; whatever computes next takes it back."""
        with _computing:
            return self._engine.switch_to_rollout()

    @transfer(GATHER)
    def switch_to_training(self) -> None:
        """Take that memory back now."""
        with _computing:
            self._engine.switch_to_training()

    @transfer(ONE_TO_ALL)
    def save(self, folder: str) -> None:
        """Write weights, optimizer state and counters; whole or absent."""
        self._engine.save_checkpoint(Path(folder))

    @transfer(ONE_TO_ALL)
    def load(self, folder: str) -> None:
        """Go on from what ``save`` wrote."""
        self._engine.load_checkpoint(Path(folder))

    @transfer(ONE_TO_ALL)
    def load_pretrained(self, folder: str) -> None:
        """Take over the weights of a folder in HuggingFace format."""
        self._engine.load_pretrained(Path(folder))

    @transfer(GATHER)
    def try_pretrained(self, folder: str) -> str | None:
        """``load_pretrained``; why the folder cannot be used, or None."""
        try:
            self._engine.load_pretrained(Path(folder))
        except (ValueError, OSError) as error:
            return str(error)
        wrong = self._engine.not_finite()
        return f"{folder} holds NaN or infinity, such as in '{wrong}'" if wrong else None

    @transfer(ONE_TO_ALL)
    def save_pretrained(self, folder: str, by_token: bool = False) -> None:
        """Write the model in HuggingFace format; whole or absent. ``by_token``: its scores are of
        tokens."""
        self._engine.save_pretrained(Path(folder), by_token=by_token)

    def close(self) -> None:
        """Leave the process group; the last model of the process closes it."""
        self._close_outbox()
        if self._folder is not None:
            owned.remove(self._folder)
        with _setting_up:
            _leave_process_group()

    def _close_outbox(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None


def pooled(values: Ragged, pooling: str, responses: Ragged, pad: int | None = None) -> torch.Tensor:
    """``[S]`` a response's score of its values, the first of which stands before its tokens.

    Args:
        pooling: ``last``, the value after the last token; ``mean``, of those after each token; or
            ``before_padding``, the value after the last token that is not ``pad``, as transformers
            reads a ``*ForSequenceClassification``: where padding is the end token, the value
            before the end.
        responses: the tokens, one fewer in each row.
    """
    starts_S = values.offsets[:-1]
    if pooling == "mean":
        first_S = values.values[starts_S]
        owner_T = torch.repeat_interleave(torch.arange(len(values)), values.lengths)
        sums_S = torch.zeros_like(first_S).index_add(0, owner_T, values.values)
        return (sums_S - first_S) / responses.lengths.clamp(min=1)
    if pooling == "last" or pad is None:
        return values.values[starts_S + responses.lengths]
    return values.values[starts_S + _lengths_before(responses, pad)]


def _lengths_before(responses: Ragged, pad: int) -> torch.Tensor:
    """``[S]`` tokens of each response up to the last one that is not ``pad``."""
    owner_T = torch.repeat_interleave(torch.arange(len(responses)), responses.lengths)
    upto_T = torch.arange(1, len(owner_T) + 1) - responses.offsets[:-1][owner_T]
    upto_T = torch.where(responses.values == pad, 0, upto_T)
    return torch.zeros(len(responses), dtype=torch.int64).scatter_reduce(0, owner_T, upto_T, "amax")


def with_next_token(batch: Batch) -> Batch:
    """Prompts and responses, each response with one more token (of id 0), so that the value before
    that token is the one after the response."""
    responses: Ragged = batch["responses"]
    offsets = responses.offsets + torch.arange(len(responses) + 1)
    values_T = responses.values.new_zeros(len(responses.values) + len(responses))
    own_T = torch.ones(len(values_T), dtype=torch.bool)
    own_T[offsets[1:] - 1] = False
    values_T[own_T] = responses.values
    told = batch.select(["prompts", "responses"])
    return told.with_field("responses", Axis.TOKENS, Ragged(values_T, offsets))


def with_margins(batch: Batch) -> Batch:
    """``with_next_token`` of pairs, which keep their margins."""
    told = with_next_token(batch)
    return told.union(batch.select(["margins"])) if "margins" in batch else told


_setting_up = threading.Lock()
_computing = threading.Lock()
"""Megatron keeps state of the forward pass in globals: one model of a process computes at a time.
"""
_members = 0
"""Models of this process. A worker's process has one; a session in one process has them all."""


def _enter_process_group(rank: int, world: int, rendezvous: tuple[str, int]) -> None:
    import torch.distributed as dist

    from megatron_bridge.runtime import device

    global _members
    device.prepare()
    if not dist.is_initialized():
        host, port = rendezvous
        dist.init_process_group(
            device.backend(),
            init_method=f"tcp://{host}:{port}",
            rank=rank,
            world_size=world,
            timeout=COLLECTIVE_TIMEOUT,
        )
    _members += 1


def _leave_process_group() -> None:
    import torch.distributed as dist

    from megatron_bridge.runtime import parallel

    global _members
    _members -= 1
    # Several ranks: their processes end with the session, and a process group that is torn down
    # while gloo's threads wait for the interpreter can hang.
    if _members == 0 and dist.get_world_size() == 1:
        parallel.destroy()
        dist.destroy_process_group()
