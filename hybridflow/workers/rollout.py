"""One rollout server and its client."""

from __future__ import annotations

import json
import time
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster.transfer import ONE_TO_ALL, transfer
from hybridflow.recipe.axes import Axis
from hybridflow.rollout.background import in_background
from hybridflow.rollout.client import RolloutError, RolloutTimeout
from hybridflow.rollout.engines import EngineFault, EngineHealth
from hybridflow.rollout.launch import ServerDied, start_server
from hybridflow.rollout.protocol import Sample
from hybridflow.weight_sync import PublishReport, publish
from megatron_bridge.runtime import device

if TYPE_CHECKING:
    from hybridflow.rollout.engines import GenerateRequest
    from hybridflow.rollout.launch import Server, ServerConfig

_AXES = {
    "responses": Axis.TOKENS,
    "rollout_logprobs": Axis.TOKENS,
    "token_versions": Axis.TOKENS,
    "finished": Axis.SAMPLES,
    "versions": Axis.SAMPLES,
}
_HANG_SECONDS = 120.0
_WATCHES = 6  # in the time after which a silent server counts as hanging


class RolloutWorker:
    """Starts a server beside itself and ends it with itself.

    A server's failure is an answer, an ``EngineFault``: this process goes on and can start the
    server anew. ``hang_seconds`` is how long a server that generates may leave /health unanswered.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        rendezvous: tuple[str, int],
        *,
        server: ServerConfig,
        hang_seconds: float = _HANG_SECONDS,
    ) -> None:
        assert world == 1, "each rollout engine is a group of its own"
        kind = "cuda" if device.on_gpu() else "cpu"
        self._config = replace(server, device=kind)
        self._hang_seconds = hang_seconds
        self._use(start_server(self._config))

    def _use(self, server: Server) -> None:
        self._server = server
        self._client = server.client()

    @transfer(ONE_TO_ALL)
    def generate(self, request: GenerateRequest) -> Batch | EngineFault:
        """``request.samples`` responses to each prompt; G of the result is that number."""
        prompts = [row.tolist() for row in request.batch["prompts"].rows()]
        if not prompts:
            return _batch([], 0, request.samples)
        try:
            groups = self._watched(request, prompts)
            return _batch(
                [sample for group in groups for sample in group], len(prompts), request.samples
            )
        except json.JSONDecodeError as error:
            return EngineFault(f"its answer is no JSON: {error}", self._server.log_tail())
        except ValueError as error:
            return EngineFault(str(error), refused=True)
        except (RolloutError, ServerDied) as error:
            return self._fault(error)

    def _watched(self, request: GenerateRequest, prompts: list[list[int]]) -> list[list[Sample]]:
        """The server's answer, for as long as it lives and answers /health."""
        self._server.check()
        ask = partial(self._client.generate, prompts, request.samples, request.sampling)
        asking = partial(ask, positions=request.positions, request_id=request.id)
        answer = in_background(request.id, asking)
        period = self._hang_seconds / _WATCHES
        healthy_at = time.monotonic()
        while not wait([answer], period).done:
            self._server.check()
            if self._client.health(timeout=period):
                healthy_at = time.monotonic()
            elif time.monotonic() - healthy_at > self._hang_seconds:
                raise RolloutTimeout(
                    f"{self._server.url} hangs: /health has had no answer for "
                    f"{self._hang_seconds:g} s"
                )
        return answer.result()

    def _fault(self, error: RolloutError | ServerDied) -> EngineFault:
        """The error with the end of the server's log; a lost connection's cause is its end."""
        status = getattr(error, "status", None)
        if status is not None and 400 <= status < 500:
            return EngineFault(str(error), refused=True)
        try:
            self._server.check_soon()
        except ServerDied as death:
            return EngineFault(death.reason, death.log)
        return EngineFault(str(error), self._server.log_tail())

    @transfer(ONE_TO_ALL)
    def health(self) -> EngineHealth:
        """How the server fares."""
        alive = self._server.alive()
        healthy = alive and self._client.health(timeout=self._hang_seconds)
        version = self._client.model_info()["weight_version"] if healthy else None
        server = self._server
        return EngineHealth(server.url, server.pid, alive, healthy, version, server.log_tail())

    @transfer(ONE_TO_ALL)
    def restart_server(self) -> EngineFault | None:
        """End the server, whatever its state, and start another from the model's folder."""
        self.close()
        try:
            self._use(start_server(self._config))
        except (RolloutError, ServerDied) as error:
            return EngineFault(str(error))
        return None

    @transfer(ONE_TO_ALL)
    def publish(self, folder: str, version: int, checksum: str) -> PublishReport | EngineFault:
        """Load a written version, prove it by checksum, then serve it."""
        try:
            self._server.check()
            return publish(self._client, folder, version, checksum)
        except (RolloutError, ServerDied) as error:
            return replace(self._fault(error), refused=False)

    def close(self) -> None:
        """End the server."""
        self._client.close()
        self._server.stop()


def _batch(samples: list[Sample], prompts: int, groups: int) -> Batch:
    fields = {
        "responses": Ragged.from_rows([s.tokens for s in samples], torch.int64),
        "rollout_logprobs": Ragged.from_rows([s.logprobs for s in samples], torch.float32),
        "token_versions": Ragged.from_rows([_token_versions(s) for s in samples], torch.int64),
        "finished": torch.tensor([s.finish_reason == "stop" for s in samples], dtype=torch.bool),
        "versions": torch.tensor([int(s.weight_version) for s in samples], dtype=torch.int64),
    }
    return Batch(fields, _AXES, prompts, groups)


def _token_versions(sample: Sample) -> list[int]:
    """The version that each token was sampled from; RolloutError when a token has none, or two."""
    versions: list[int] = []
    for span in sample.spans:
        if span.start != len(versions):
            break
        versions += [int(span.version)] * (span.end - span.start)
    if len(versions) != len(sample.tokens):
        raise RolloutError(
            f"a server's weight versions {sample.spans} do not cover the {len(sample.tokens)} "
            "tokens of its response one by one"
        )
    return versions
