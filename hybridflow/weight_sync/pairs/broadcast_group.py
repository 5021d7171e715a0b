"""The process group that a trainer's rank 0 and a server's ranks broadcast weights in.

The server makes its side with SGLang's `init_custom_process_group`: a TCP store at rank 0, then
`torch.distributed`'s own helper, whose names in the store are part of how the two sides meet. This
side stays outside `torch.distributed`'s global state.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from hybridflow.weight_sync.pairs.link import Deadline, PairError, PairTimeout

_LOOK_SECONDS = 0.2
_c10d: Any = torch.distributed  # its stubs lack what a group's own object can do


class BroadcastGroup:
    """Rank 0's side: its store listens on `host` alone from the start; `join` waits for the others.

    Attributes:
        invitation: what the server must be told to join.
    """

    def __init__(self, backend: str, host: str, world: int, name: str, seconds: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family)
        port = listening.getsockname()[1]
        self._backend, self._world, self._seconds, self._name = backend, world, seconds, name
        self._host = host
        wait = timedelta(seconds=seconds)
        self._store = _c10d.TCPStore(
            host, port, world, True, wait, False, master_listen_fd=listening.detach()
        )
        self.invitation = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world,
            "group_name": name,
            "backend": backend,
        }
        self._group: Any = None
        self._work: Any = None

    def join(self, look: Callable[[], None] = lambda: None) -> None:
        """Form the group.

        Args:
            look: called while the others are awaited; what it raises ends the wait.

        Raises:
            PairTimeout: not all of the server's ranks came.
        """
        until = Deadline(self._seconds)
        device = "cuda" if self._backend == "nccl" else "cpu"
        store = _c10d.PrefixStore(self._name, self._store)
        for prefix in (f"{self._name}/", f"{device}/"):
            store = _c10d.PrefixStore(prefix, store)
        try:
            self._group = _while_looking(lambda: self._make(store), look)
        except RuntimeError as error:
            kind = PairTimeout if until.over() else PairError
            raise kind(f"the server did not join the group {self._name}: {error}") from error

    def broadcast(self, tensor: Tensor) -> None:
        """Start sending to every rank; the tensor is borrowed until `flush`."""
        assert self._work is None, "flush comes first"
        self._work = self._group.broadcast([tensor], _c10d.BroadcastOptions())

    def flush(self) -> None:
        """Wait until it was sent; RuntimeError when a rank is lost or does not take it."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait(timedelta(seconds=self._seconds))

    def _make(self, store: Any) -> Any:
        wait = timedelta(seconds=self._seconds)
        if self._backend == "gloo":
            options = _c10d.ProcessGroupGloo._Options()
            options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=self._host)]
            options._threads, options._timeout = 1, wait
            return _c10d.ProcessGroupGloo(store, 0, self._world, options)
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = wait
        return _c10d.ProcessGroupNCCL(store, 0, self._world, options)


def _while_looking(make: Callable[[], Any], look: Callable[[], None]) -> Any:
    """What ``make`` gives, or what ``look`` raises meanwhile; its thread then ends by itself."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # noqa: BLE001 - raised below
            made.set_exception(error)

    threading.Thread(target=run, name="join", daemon=True).start()
    while not wait([made], _LOOK_SECONDS).done:
        look()
    return made.result()
