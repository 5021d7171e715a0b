"""A process group of two outside `torch.distributed`'s global state, over gloo or NCCL."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from hybridflow.weight_sync.pairs.link import KEY, Deadline, Link, PairError, PairTimeout

_c10d: Any = torch.distributed  # its stubs lack what a group's own object can do
_POLL_SECONDS = 0.001
_SLACK_SECONDS = 0.05
"""gloo counts whole milliseconds: it must not give up before the deadline is over."""
_LONGEST_VALUE = 1 << 16


class GlooPair:
    """Sends and receives CPU tensors; listens on the control connection's own address alone."""

    def __init__(self, link: Link, rank: int, until: Deadline) -> None:
        self.device = torch.device("cpu")
        self._peer = 1 - rank
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=link.own_host)]
        options._threads = 1
        options._timeout = timedelta(seconds=until.left())
        self._group = _c10d.ProcessGroupGloo(_LinkStore(link, until), rank, 2, options)

    def send(self, tensor: Tensor) -> Any:
        """Start sending; the tensor is borrowed until `wait`."""
        return self._group.send([tensor], self._peer, 0)

    def receive(self, tensor: Tensor) -> Any:
        """Start receiving into `tensor`."""
        return self._group.recv([tensor], self._peer, 0)

    def wait(self, work: Any, until: Deadline) -> None:
        """Until done; RuntimeError when the peer is lost or the deadline passes."""
        work.wait(timedelta(seconds=until.left() + _SLACK_SECONDS))


class NcclPair:
    """The same for tensors on the current CUDA device; the peer's must be another device."""

    def __init__(self, link: Link, rank: int, until: Deadline) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._peer = 1 - rank
        options = _c10d.ProcessGroupNCCL.Options()
        # Our own deadlines are the shorter ones: NCCL's watchdog would end the whole process.
        options._timeout = timedelta(days=1)
        self._group = _c10d.ProcessGroupNCCL(_tcp_store(link, rank, until), rank, 2, options)

    def send(self, tensor: Tensor) -> Any:
        """Start sending; the tensor is borrowed until `wait`."""
        return self._group.send([tensor], self._peer, 0)

    def receive(self, tensor: Tensor) -> Any:
        """Start receiving into `tensor`."""
        return self._group.recv([tensor], self._peer, 0)

    def wait(self, work: Any, until: Deadline) -> None:
        """Until done on the device; at the deadline the group is aborted: PairTimeout."""
        while not work.is_completed():
            if until.over():
                self._group.abort()
                raise PairTimeout(f"NCCL had not finished after {until.seconds:.0f} s")
            time.sleep(_POLL_SECONDS)
        work.wait()  # raises what went wrong


class _LinkStore(_c10d.Store):
    """A rendezvous over an authenticated link: no port of its own that others could reach."""

    def __init__(self, link: Link, until: Deadline) -> None:
        super().__init__()
        self._link, self._until = link, until
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Keep a value and tell the peer."""
        self._values[key] = bytes(value)
        name = key.encode()
        self._link.send(KEY, len(name), len(value), name + value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until the peer has told every key; the link's deadline counts."""
        while not all(key in self._values for key in keys):
            kind, name, value = self._link.receive(self._until)
            if kind != KEY or max(name, value) > _LONGEST_VALUE:
                raise PairError("the peer broke off the rendezvous")
            key = self._link.take(name, self._until).decode()
            self._values[key] = self._link.take(value, self._until)

    def get(self, key: str) -> bytes:
        """A value, waited for."""
        self.wait([key])
        return self._values[key]


def _tcp_store(link: Link, rank: int, until: Deadline) -> Any:
    """A TCP store on the link's own address; its port travels over the link."""
    wait = timedelta(seconds=until.left())
    if rank == 0:
        family = socket.AF_INET6 if ":" in link.own_host else socket.AF_INET
        listening = socket.create_server((link.own_host, 0), family=family)
        port = listening.getsockname()[1]
        store = _c10d.TCPStore(
            link.own_host, port, 2, True, wait, False, master_listen_fd=listening.detach()
        )
        link.send(KEY, port)
        return store
    _, port, _ = link.receive(until)
    return _c10d.TCPStore(link.peer.rpartition(":")[0], port, 2, False, wait, False)


GROUPS: dict[str, type[GlooPair] | type[NcclPair]] = {"gloo": GlooPair, "nccl": NcclPair}
"""By the name that a recipe gives the backend."""
