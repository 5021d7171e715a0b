"""What the ranks of a torchrun job say to each other outside their collectives.

Short texts in torchrun's own store: what rank 0 decided, and that a rank has failed. A rank that
waits in a collective for one that is gone thus learns why.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from hybridflow.cluster.errors import ClusterError, WorkerError
from hybridflow.cluster.host import Failure

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_FAILED = "hybridflow/failed"
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class RankFailure:
    """The first failure that a rank told the others."""

    rank: int
    role: str
    method: str
    failure: Failure

    def error(self) -> WorkerError:
        """As the error that the rank itself raised."""
        told = self.failure
        return WorkerError(self.role, self.rank, self.method, told.kind, told.message, told.trace)


class RanksStore:
    """A rank's connection to torchrun's store, beside the one that torch.distributed has."""

    def __init__(self, seconds: float = 600.0) -> None:
        """Waits up to ``seconds`` for the store; ValueError when torchrun did not start this."""
        from torch.distributed.rendezvous import rendezvous

        if missing := [name for name in NEEDED if name not in os.environ]:
            raise ValueError(f"torchrun has not set {', '.join(missing)}; start with torchrun")
        self._seconds = seconds
        timeout = datetime.timedelta(seconds=seconds)
        store: Any
        store, self.rank, self.world = next(iter(rendezvous("env://", timeout=timeout)))
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.for_collectives: Any = store
        self._store: Any = store.clone()

    def tell(self, key: str, text: str) -> None:
        """Says ``text`` under ``key`` to all ranks."""
        self._store.set(f"hybridflow/said/{key}", text)

    def hear(self, key: str) -> str:
        """What was said under ``key``; waits for it.

        Raises:
            WorkerError: another rank has failed meanwhile.
            TimeoutError: nothing was said in time.
        """
        name = f"hybridflow/said/{key}"
        deadline = time.monotonic() + self._seconds
        while not self._check(name):
            if (failed := self.failure()) is not None:
                raise failed.error()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {self.rank} waited {self._seconds:g} s for rank 0 to say '{key}'"
                )
            time.sleep(_POLL_SECONDS)
        return self._store.get(name).decode()

    def await_said(self, key: str, seconds: float) -> bool:
        """Whether something is said under ``key`` within so many seconds."""
        deadline = time.monotonic() + seconds
        while not (said := self._check(f"hybridflow/said/{key}")) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return said

    def fail(self, role: str, method: str, failure: Failure) -> None:
        """Tells the other ranks; only the first failure of a job is kept."""
        told = {"rank": self.rank, "role": role, "method": method, "failure": asdict(failure)}
        self._store.compare_set(_FAILED, "", json.dumps(told))

    def failure(self) -> RankFailure | None:
        """The job's first failure."""
        if not self._check(_FAILED):
            return None
        told = json.loads(self._store.get(_FAILED).decode())
        failure = Failure(**told.pop("failure"))
        return RankFailure(**told, failure=failure)

    def _check(self, name: str) -> bool:
        try:
            return self._store.check([name])
        except RuntimeError as error:
            raise ClusterError(
                f"rank {self.rank} has lost torchrun's store at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {error}"
            ) from error
