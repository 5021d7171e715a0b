"""One rollout server for many runs of this process: what it costs to start, they pay once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.cluster import LocalSession, WorkerGroup
from hybridflow.cluster.transfer import ONE_TO_ALL, transfer
from hybridflow.workers.rollout import RolloutWorker


class KeptRollout(RolloutWorker):
    """A rollout worker whose server can go back to where it started."""

    @transfer(ONE_TO_ALL)
    def reset(self, model: Path) -> None:
        """The weights of the model's folder, as version 0."""
        self._client.pause("retract")
        self._client.update_from_disk(model)
        self._client.set_version(0)
        self._client.continue_()


class KeptServer:
    """Gives sessions whose group ``rollout`` is one and the same; ``close`` it."""

    def __init__(self, model: Path) -> None:
        self._home = LocalSession()
        self._model = model
        self._group: WorkerGroup | None = None

    def session(self) -> LocalSession:
        """A session of one run."""
        return _Session(self)

    def group(self, layout: int, settings: Mapping[str, Any]) -> WorkerGroup:
        """The started server, with the weights of the model's folder."""
        if self._group is None:
            pool = self._home.pool("rollout", 1)
            self._group = self._home.group("rollout", KeptRollout, layout, pool, settings)
        else:
            self._group.run(KeptRollout.reset, self._model)
        return self._group

    def close(self) -> None:
        """End the server."""
        self._home.close()


class _Session(LocalSession):
    def __init__(self, kept: KeptServer) -> None:
        super().__init__()
        self._kept = kept

    def group(self, name: str, worker_class: type, *told: Any, **named: Any) -> WorkerGroup:
        if worker_class is RolloutWorker:
            layout, _, settings = told
            return self._kept.group(layout, settings)
        return super().group(name, worker_class, *told, **named)
