"""What the ranks of a torchrun job say to each other before they are connected.

Short texts in torchrun's own store, such as where rank 0 listens.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
from typing import Any

from hybridflow.cluster.errors import ClusterError
from hybridflow.cluster.host import Node

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 0.1


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

    def hear(self, key: str, seconds: float | None = None) -> str:
        """What was said under ``key``; waits for it, for ``seconds`` or the store's own.

        Raises:
            TimeoutError: nothing was said in time.
        """
        name = f"hybridflow/said/{key}"
        patience = self._seconds if seconds is None else seconds
        deadline = time.monotonic() + patience
        while not self._check(name):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {self.rank} waited {patience:g} s for rank 0 to say '{key}'"
                )
            time.sleep(_POLL_SECONDS)
        return self._store.get(name).decode()

    def await_said(self, key: str, seconds: float) -> bool:
        """Whether something is said under ``key`` within so many seconds."""
        deadline = time.monotonic() + seconds
        while not (said := self._check(f"hybridflow/said/{key}")) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return said

    def node(self) -> Node:
        """The machine of this rank, by torchrun's number; ranks of one machine meet on its
        loopback."""
        alone = os.environ.get("LOCAL_WORLD_SIZE") == str(self.world)
        number = os.environ.get("GROUP_RANK", "0")
        return Node(f"node-{number}", "127.0.0.1" if alone else _own_address())

    def _check(self, name: str) -> bool:
        try:
            return self._store.check([name])
        except RuntimeError as error:
            raise ClusterError(
                f"rank {self.rank} has lost torchrun's store at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {error}"
            ) from error


def _own_address() -> str:
    """The address by which this machine reaches the job's first one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return probe.getsockname()[0]
