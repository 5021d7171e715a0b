"""One rollout server and its client."""

from __future__ import annotations

import json
import time
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridflow import owned
from hybridflow.batch import Batch
from hybridflow.cluster.host import this_node
from hybridflow.cluster.transfer import ONE_TO_ALL, transfer
from hybridflow.rollout.background import in_background
from hybridflow.rollout.client import RolloutError, RolloutTimeout
from hybridflow.rollout.engines import EngineFault, EngineHealth
from hybridflow.rollout.launch import ServerDied, start_server
from hybridflow.rollout.samples import batch_of
from hybridflow.weight_sync.folders import memory, own_folder
from hybridflow.weight_sync.inbox import PHASES, EngineSide, Fault, PhaseReport
from hybridflow.weight_sync.transports import make_inbox
from megatron_bridge.reshard import Seat
from megatron_bridge.runtime import device

if TYPE_CHECKING:
    from hybridflow.rollout.client import RolloutClient
    from hybridflow.rollout.engines import GenerateRequest
    from hybridflow.rollout.launch import Server, ServerConfig
    from hybridflow.rollout.protocol import Sample
    from hybridflow.weight_sync.wiring import Wiring

_HANG_SECONDS = 120.0
_WATCHES = 6  # in the time after which a silent server counts as hanging


class RolloutWorker:
    """Starts a server beside itself and ends it with itself.

    A server's failure is an answer, an ``EngineFault``: this process goes on and can start the
    server anew. ``gpus`` are this machine's that the server's ranks use, in their order; None:
    those that this process sees. ``sync_parent`` is where its folder of shared memory is made;
    None: the host's memory. ``hang_seconds`` is how long a server that generates may leave /health
    unanswered.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        rendezvous: tuple[str, int],
        *,
        server: ServerConfig,
        gpus: tuple[int, ...] | None = None,
        sync_parent: str | None = None,
        hang_seconds: float = _HANG_SECONDS,
    ) -> None:
        assert world == 1, "each rollout engine is a group of its own"
        kind = "cuda" if device.on_gpu() else "cpu"
        if kind == "cpu" and gpus is not None:
            raise ValueError(
                f"the rollout server has GPUs {gpus}, and torch finds no CUDA device here; install "
                "torch for CUDA"
            )
        self._folder = own_folder(sync_parent or memory())
        self._side: EngineSide | None = None
        self._publication_seconds: float | None = None
        self._config = replace(server, device=kind, gpus=gpus, sync_folder=self._folder)
        self._hang_seconds = hang_seconds
        try:
            self._use(start_server(self._config))
        except BaseException:
            owned.remove(self._folder)
            raise

    def _use(self, server: Server) -> None:
        self._server = server
        self._client = server.client()
        self._publishing: RolloutClient | None = None

    def _publication_client(self) -> RolloutClient:
        """A client of the present server whose calls have the publication's deadline."""
        if self._publishing is None:
            self._publishing = self._server.client(self._publication_seconds)
        return self._publishing

    @transfer(ONE_TO_ALL)
    def generate(self, request: GenerateRequest) -> Batch | EngineFault:
        """``request.samples`` responses to each prompt; G of the result is that number."""
        prompts = [row.tolist() for row in request.batch["prompts"].rows()]
        if not prompts:
            return batch_of([], request.samples)
        try:
            return batch_of(self._watched(request, prompts), request.samples)
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
        version = None
        if healthy:
            with suppress(RolloutError):  # it has just ended: then it does not say
                version = self._client.model_info()["weight_version"]
        server = self._server
        return EngineHealth(server.url, server.pid, alive, healthy, version, server.log_tail())

    @transfer(ONE_TO_ALL)
    def restart_server(self) -> EngineFault | None:
        """End the server, whatever its state, and start another from the model's folder."""
        self._stop_server()
        try:
            self._use(start_server(self._config))
        except (RolloutError, ServerDied) as error:
            return EngineFault(str(error))
        return None

    @transfer(ONE_TO_ALL)
    def seats(self) -> tuple[Seat, ...]:
        """Where each rank of the server runs."""
        tp, here = self._config.tp, this_node().id
        if self._config.device == "cpu":
            return (Seat(here, None),) * tp
        return tuple(Seat(here, gpu) for gpu in self._config.gpus or device.visible()[:tp])

    @transfer(ONE_TO_ALL)
    def device_kind(self) -> str:
        """What the server runs on, "cpu" or "cuda"."""
        return self._config.device

    @transfer(ONE_TO_ALL)
    def connect(self, wiring: Wiring, engine: int) -> None:
        """Make ready for publications, as engine number ``engine`` of ``wiring``."""
        if self._side is not None:
            self._side.close()
        inbox = make_inbox(wiring, engine, self._folder, this_node().address)
        self._side = EngineSide(engine, inbox, self._publication_client, wiring.sync.pause)
        self._publication_seconds = wiring.sync.seconds
        self._close_publishing()

    @transfer(ONE_TO_ALL, beside=True)
    def publication(self, phase: str, version: int, *args: Any) -> PhaseReport:
        """A phase of a publication (see ``EngineSide``); a fault has the end of a dead server's
        log."""
        assert self._side is not None and phase in PHASES, f"connect comes before {phase}"
        try:
            owned.keep(self._folder)  # cleaners of /dev/shm take files of jobs that run, too
        except (OSError, ValueError) as error:
            return PhaseReport(self._side.engine, version, Fault(f"{phase}: {error}"))
        report: PhaseReport = getattr(self._side, phase)(version, *args)
        if report.fault is None or (self._server.alive() and self._client.health()):
            return report
        try:
            self._server.check_soon()
        except ServerDied as death:
            return replace(report, fault=Fault(f"{death.reason} ({report.fault})", death.log))
        return report

    def close(self) -> None:
        """End the server, and give its shared memory back."""
        self._stop_server()
        if self._side is not None:
            self._side.close()
        owned.remove(self._folder)

    def _stop_server(self) -> None:
        self._client.close()
        self._close_publishing()
        self._server.stop()

    def _close_publishing(self) -> None:
        """The next publication's client has the present server and deadline."""
        if self._publishing is not None:
            self._publishing.close()
            self._publishing = None
