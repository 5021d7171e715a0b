"""One rollout server and its client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster.transfer import DATA_PARALLEL, ONE_TO_ALL, transfer
from hybridflow.recipe.axes import Axis
from hybridflow.rollout.client import RolloutError
from hybridflow.rollout.launch import start_server
from hybridflow.rollout.protocol import Sample, Sampling
from hybridflow.weight_sync import PublishReport, publish
from megatron_bridge.runtime import device

if TYPE_CHECKING:
    from hybridflow.rollout.launch import ServerConfig

_AXES = {
    "responses": Axis.TOKENS,
    "rollout_logprobs": Axis.TOKENS,
    "finished": Axis.SAMPLES,
    "versions": Axis.SAMPLES,
}


class RolloutWorker:
    """Starts a server beside itself and ends it with itself."""

    def __init__(
        self,
        rank: int,
        world: int,
        rendezvous: tuple[str, int],
        *,
        server: ServerConfig,
    ) -> None:
        self._rank = rank
        kind = "cuda" if device.on_gpu() else "cpu"
        self._server = start_server(replace(server, device=kind))
        self._client = self._server.client()

    @transfer(DATA_PARALLEL)
    def generate(self, batch: Batch, samples: int, sampling: Sampling) -> Batch:
        """``samples`` responses to each prompt; G of the result is ``samples``."""
        if not batch.prompts:
            return _batch([], 0, samples)
        self._server.check()
        prompts = [row.tolist() for row in batch["prompts"].rows()]
        with self._blaming_a_dead_server():
            groups = self._client.generate(prompts, samples, self._seeded(sampling))
        return _batch([sample for group in groups for sample in group], len(prompts), samples)

    @transfer(ONE_TO_ALL)
    def publish(self, folder: str, version: int, checksum: str) -> PublishReport:
        """Load a written version, prove it by checksum, then serve it."""
        self._server.check()
        with self._blaming_a_dead_server():
            return publish(self._client, folder, version, checksum)

    @contextmanager
    def _blaming_a_dead_server(self) -> Iterator[None]:
        """A lost connection's cause: the server's end, with the tail of its log."""
        try:
            yield
        except RolloutError:
            self._server.check_soon()
            raise

    def _seeded(self, sampling: Sampling) -> Sampling:
        """Another seed on each server, so that no two draw the same numbers."""
        if sampling.seed is None:
            return sampling
        return replace(sampling, seed=(sampling.seed + 1_000_003 * self._rank) % 2**31)

    def close(self) -> None:
        """End the server."""
        self._client.close()
        self._server.stop()


def _batch(samples: list[Sample], prompts: int, groups: int) -> Batch:
    fields = {
        "responses": Ragged.from_rows([s.tokens for s in samples], torch.int64),
        "rollout_logprobs": Ragged.from_rows([s.logprobs for s in samples], torch.float32),
        "finished": torch.tensor([s.finish_reason == "stop" for s in samples], dtype=torch.bool),
        "versions": torch.tensor([int(s.weight_version) for s in samples], dtype=torch.int64),
    }
    return Batch(fields, _AXES, prompts, groups)
