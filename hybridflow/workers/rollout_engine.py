"""A rollout engine as the fleet sees it: a worker group of one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hybridflow.batch import Batch
from hybridflow.cluster.errors import ClusterError
from hybridflow.cluster.group import WorkerGroup
from hybridflow.rollout.engines import EngineFailed, EngineFault, EngineHealth, GenerateRequest
from hybridflow.workers.rollout import RolloutWorker

GRACE_SECONDS = 60.0
"""How much later than its server's own deadline a worker must have answered."""


class RolloutEngine:
    """One engine, whose group breaks and starts anew without the others.

    Args:
        name: of its group.
        start: starts the group and returns at once.
        start_seconds, request_seconds: deadlines of the server.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], WorkerGroup],
        *,
        start_seconds: float,
        request_seconds: float,
    ) -> None:
        self._name = name
        self._start = start
        self._start_seconds = start_seconds + GRACE_SECONDS
        self._request_seconds = request_seconds + GRACE_SECONDS
        self._one_restart = threading.Lock()
        self.group = start()

    @property
    def name(self) -> str:
        """Of its group as well."""
        return self._name

    def wait_until_started(self) -> None:
        """Waits for its server; raises what kept it from starting."""
        self.group.wait_until_started()

    def generate(self, request: GenerateRequest) -> Future[Batch | EngineFault]:
        """Begins to answer; see ``Engine.generate``."""
        return self.group.call(RolloutWorker.generate, request, timeout=self._request_seconds)

    def health(self) -> EngineHealth:
        """How its server fares, once its other calls have ended."""
        return self.run(RolloutWorker.health, timeout=self._request_seconds)

    def run(
        self, method: Callable[..., Any], *args: Any, timeout: float | None = None, **named: Any
    ) -> Any:
        """Calls a method of its worker and waits; ``EngineFailed`` when it answers with a fault."""
        result = self.group.run(method, *args, timeout=timeout, **named)
        if isinstance(result, EngineFault):
            raise EngineFailed(self.name, result)
        return result

    def restart(self) -> bool:
        """A new server with the weights of the model's folder; in a new worker where the old one
        is gone or does not manage it. Whether the worker is new.

        Raises:
            EngineFailed: the server did not start.
            ClusterError: the worker did not start.
        """
        with self._one_restart:
            if not self.group.over and self._restart_server():
                return False
            self.group.close()
            self.group = self._start()
            self.group.wait_until_started()
            return True

    def _restart_server(self) -> bool:
        """Whether there was a worker to do it."""
        try:
            self.run(RolloutWorker.restart_server, timeout=self._start_seconds)
        except ClusterError:
            assert self.group.over, "a worker's failure breaks its group"
            return False
        return True

    def close(self) -> None:
        """Ends its worker and server."""
        self.group.close()
