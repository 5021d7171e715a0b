"""One rank of a model role: the actor, or a frozen reference."""

from __future__ import annotations

import datetime
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.batch import Batch
from hybridflow.cluster.transfer import DATA_PARALLEL, GATHER, ONE_TO_ALL, transfer
from hybridflow.recipe.axes import Axis

if TYPE_CHECKING:
    from hybridflow.megatron.config import EngineConfig, LossSettings, OptimizerSettings
    from hybridflow.megatron.memory import Memory

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class WrittenVersion:
    """A version of the weights on disk, and the digest that a server must show for it."""

    folder: str
    checksum: str


class ModelWorker:
    """Holds an engine; methods are collective over the role's ranks.

    The engine's packages are imported here, in the worker's process: the driver needs none.
    """

    def __init__(
        self, rank: int, world: int, rendezvous: tuple[str, int], *, engine: EngineConfig
    ) -> None:
        with _setting_up:
            _enter_process_group(rank, world, rendezvous)
            from hybridflow.megatron.engine import Engine

            self._engine = Engine(engine)
        self._rank = rank
        self._model_path = engine.model_path

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
    def update(self, batch: Batch, loss: LossSettings) -> dict[str, float]:
        """The optimizer steps of one training step; the same metrics on every rank."""
        with _computing:
            return self._engine.update(batch, loss)

    @transfer(ONE_TO_ALL)
    def begin_stage(self, optimizer: OptimizerSettings) -> None:
        """A fresh optimizer and learning-rate schedule for the next stage."""
        self._engine.begin_stage(optimizer)

    @transfer(ONE_TO_ALL)
    def write_version(self, directory: str, version: int, tp: int) -> WrittenVersion | None:
        """Stream the weights into ``directory``/v``version``, with the digest of a server of
        ``tp`` ranks; rank 0 writes."""
        from hybridflow.weight_sync import ServerDigest, write_version
        from megatron_bridge.live import load_hf_config

        weights = self._engine.export_weights()
        if self._rank:
            for _ in weights:
                raise AssertionError("only rank 0 receives exported weights")
            return None
        digest = ServerDigest(load_hf_config(self._model_path), tp)
        folder = write_version(directory, digest.watch(weights), self._model_path, version)
        return WrittenVersion(str(folder), digest.result())

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
        """Write weights, optimizer and random state; whole or absent."""
        self._engine.save_checkpoint(Path(folder))

    @transfer(ONE_TO_ALL)
    def load(self, folder: str) -> None:
        """Go on from what ``save`` wrote."""
        self._engine.load_checkpoint(Path(folder))

    @transfer(ONE_TO_ALL)
    def save_pretrained(self, folder: str) -> None:
        """Write the model in HuggingFace format; whole or absent."""
        self._engine.save_pretrained(Path(folder))

    def close(self) -> None:
        """Leave the process group; the last model of the process closes it."""
        with _setting_up:
            _leave_process_group()


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
