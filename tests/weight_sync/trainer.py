"""A trainer's live ranks: Megatron models in processes of their own, commanded over pipes.

The ranks are forked by a process that has imported Megatron and started nothing (Python's
forkserver), so that four of them start as fast as one, whatever threads the test's process has.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hybridflow.cluster.host import Death, Failure, Outcome, Success, attempt, free_port
from hybridflow.megatron.config import DTYPES, EngineConfig, OptimizerSettings
from hybridflow.workers.model import ModelWorker
from megatron_bridge.layout import ParallelLayout
from tests.tiny_models import VOCAB

_DEADLINE = 300.0
_RATE = 3e-3
_IMPORTS = "tests.weight_sync.trainer_imports"


class RankFailed(AssertionError):
    """A rank raised, died or hung."""


class LearningWorker(ModelWorker):
    """A rank of an actor that makes its own batches."""

    def learn(self, seed: int, layout: ParallelLayout) -> dict[str, float]:
        """One optimizer step on a batch of this seed; every parameter moves."""
        from tests.megatron.cases import GRPO, make_batch, my_part

        return self.update(my_part(make_batch(seed, VOCAB), layout), GRPO)


class Trainer:
    """Every rank of one model, with an optimizer. Close it.

    Args:
        model: HuggingFace folder that the ranks start from.
    """

    def __init__(self, model: Path, layout: ParallelLayout, dtype: str = "float32") -> None:
        self.model, self.layout, self.dtype = model, layout, dtype
        optimizer = OptimizerSettings(lr=_RATE)
        engine = EngineConfig(str(model), layout, DTYPES[dtype], optimizer=optimizer)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_IMPORTS])
        rendezvous = ("127.0.0.1", free_port())
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(layout.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, layout.world, rendezvous, engine), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        self._answers("start")

    def run(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank's worker at once; the results in rank order.

        Raises:
            RankFailed: a rank raised, died or did not answer; names it.
        """
        for pipe in self._pipes:
            pipe.send((method, args))
        return self._answers(method)

    def learn(self, seed: int) -> None:
        """One optimizer step."""
        self.run("learn", seed, self.layout)

    def send(self, endpoints: Mapping[int, Any], version: int) -> list[Any]:
        """What ``publish_to`` asks of a trainer."""
        return self.run("send", endpoints, version)

    def export(self, folder: Path) -> Path:
        """Write the model as a HuggingFace folder."""
        self.run("save_pretrained", str(folder))
        return folder

    def close(self) -> None:
        """End the ranks; each gives back what it holds."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()

    def _answers(self, method: str) -> list[Any]:
        deadline = time.monotonic() + _DEADLINE
        outcomes = [self._answer(rank, deadline) for rank in range(self.layout.world)]
        faults = [
            f"rank {rank}, {method}: {_told(outcome)}"
            for rank, outcome in enumerate(outcomes)
            if not isinstance(outcome, Success)
        ]
        if faults:
            raise RankFailed("\n".join(faults))
        return [outcome.value for outcome in outcomes if isinstance(outcome, Success)]

    def _answer(self, rank: int, deadline: float) -> Outcome:
        pipe, process = self._pipes[rank], self.processes[rank]
        left = max(deadline - time.monotonic(), 0.0)
        if not wait([pipe, process.sentinel], left):
            return Death(f"had not answered after {_DEADLINE:g} s")
        try:
            return pipe.recv()
        except (EOFError, OSError):
            process.join(10)
            return Death(f"it ended with status {process.exitcode}")


def _told(outcome: Outcome) -> str:
    return outcome.trace if isinstance(outcome, Failure) else str(outcome)


def _serve(
    pipe: Connection, rank: int, world: int, rendezvous: tuple[str, int], engine: EngineConfig
) -> None:
    """The whole life of one rank: as long as the other end of its pipe is open."""
    import torch

    torch.set_num_threads(1)
    made = attempt(LearningWorker, rank, world, rendezvous, engine=engine)
    worker: Any = made.value if isinstance(made, Success) else None
    pipe.send(Success(None) if worker else made)
    while worker:
        try:
            method, args = pipe.recv()
        except (EOFError, OSError):
            worker.close()
            break
        pipe.send(attempt(getattr(worker, method), *args))
    # A process group that is torn down while gloo's threads wait for the interpreter can hang.
    os._exit(0)
