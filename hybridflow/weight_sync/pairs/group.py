"""A process group of two outside `torch.distributed`'s global state, over gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from hybridflow.weight_sync.pairs.link import KEY, Deadline, Link, PairError

_c10d: Any = torch.distributed  # its stubs lack what a group's own object can do
_SLACK_SECONDS = 0.05
"""gloo counts whole milliseconds: it must not give up before the deadline is over."""
_LONGEST_VALUE = 1 << 16


class GlooPair:
    """Sends and receives CPU tensors; listens on the control connection's own address alone."""

    def __init__(self, link: Link, rank: int, until: Deadline) -> None:
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
