"""Who takes part in a conversion: this process alone, or all of a torchrun with a shared folder.

Each rank begins with a batch of its own; then one counter hands them out, so that a fast rank does
more. Ranks talk through torchrun's key-value store: a few bytes a batch, and a failure of one is
known to all.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

STALL_SECONDS = 600.0
"""Longest time in which no host makes progress."""
_JOIN_SECONDS = 300.0
_BEAT_SECONDS = 1.0


class Hosts(Protocol):
    """The processes that share a conversion; one a host, or several."""

    rank: int
    world: int
    local_world: int

    def connect(self) -> None:
        """Find the others; after the workers were forked, for it may start threads."""
        ...

    def take(self) -> int:
        """0, 1, 2 ...: each number once over all ranks."""
        ...

    def tell(self, name: str, value: str) -> None:
        """Publish a value under a name."""
        ...

    def ask(self, name: str, what: str) -> str:
        """The value that another rank publishes; ``what`` names it for the error."""
        ...

    def meet(self, name: str, progress: int) -> None:
        """Return once every rank has come here; fails when none makes progress any more."""
        ...

    def beat(self, progress: int) -> int:
        """Say how far this rank is; returns how far the others are together.

        Raises:
            HostFailed: when another one gave up.
        """
        ...

    def fail(self, message: str) -> None:
        """Tell the others that this rank gives up."""
        ...


class HostFailed(RuntimeError):
    """Another rank gave up, or does not answer."""


class Alone:
    """One process."""

    rank, world, local_world = 0, 1, 1

    def __init__(self) -> None:
        self._next = 0
        self._told: dict[str, str] = {}

    def connect(self) -> None:
        """See `Hosts`."""

    def take(self) -> int:
        """See `Hosts`."""
        self._next += 1
        return self._next - 1

    def tell(self, name: str, value: str) -> None:
        """See `Hosts`."""
        self._told[name] = value

    def ask(self, name: str, what: str) -> str:
        """See `Hosts`."""
        return self._told[name]

    def meet(self, name: str, progress: int) -> None:
        """See `Hosts`."""

    def beat(self, progress: int) -> int:
        """See `Hosts`."""
        return 0

    def fail(self, message: str) -> None:
        """See `Hosts`."""


class _Store:
    """torchrun's key-value store; its errors say what they mean here."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, name)(*arguments)
        except (OSError, RuntimeError) as error:
            raise HostFailed(
                f"torchrun's store, through which ranks talk, is gone ({error}): its agent was "
                "killed, or the network fails; --resume continues"
            ) from error


class Torchrun:
    """The processes of a torchrun, as its environment says."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.local_world = int(os.environ["LOCAL_WORLD_SIZE"])
        self._store: Any = None
        self._began = False
        self._beaten = 0.0
        self._others = 0

    def connect(self) -> None:
        """See `Hosts`."""
        from torch.distributed.rendezvous import rendezvous

        try:
            found = rendezvous("env://", timeout=timedelta(seconds=_JOIN_SECONDS))
            self._store = _Store(next(iter(found))[0])
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise HostFailed(
                f"torchrun's store at {where} does not answer within {_JOIN_SECONDS:.0f} s: {error}"
            ) from error

    def take(self) -> int:
        """See `Hosts`."""
        if not self._began:
            self._began = True
            return self.rank
        return self.world + self._store.add("convert/next", 1) - 1

    def tell(self, name: str, value: str) -> None:
        """See `Hosts`."""
        self._store.set(f"convert/{name}", value)

    def ask(self, name: str, what: str) -> str:
        """See `Hosts`."""
        key = f"convert/{name}"
        self._wait(lambda: self._store.check([key]), lambda: what, 0)
        return self._store.get(key).decode()

    def meet(self, name: str, progress: int) -> None:
        """See `Hosts`."""
        self._store.set(f"convert/{name}/{self.rank}", "here")

        def arrived() -> bool:
            return self._store.check([f"convert/{name}/{r}" for r in range(self.world)])

        def absent() -> str:
            ranks = [r for r in range(self.world) if not self._store.check([f"convert/{name}/{r}"])]
            return f"ranks {ranks} to reach '{name}'"

        self._wait(arrived, absent, progress)

    def beat(self, progress: int) -> int:
        """See `Hosts`."""
        if time.monotonic() - self._beaten > _BEAT_SECONDS:
            self._beaten = time.monotonic()
            self._store.set(f"convert/beat/{self.rank}", str(progress))
            if self._store.check(["convert/failed"]):
                raise HostFailed(self._store.get("convert/failed").decode())
            keys = [f"convert/beat/{r}" for r in range(self.world) if r != self.rank]
            self._others = sum(int(self._store.get(k)) for k in keys if self._store.check([k]))
        return self._others

    def fail(self, message: str) -> None:
        """See `Hosts`."""
        if self._store is None:
            return
        with contextlib.suppress(HostFailed):  # then the others notice it themselves
            if not self._store.check(["convert/failed"]):
                line = f"rank {self.rank} on {socket.gethostname()} failed: {message}"
                self._store.set("convert/failed", line)

    def _wait(self, reached: Callable[[], bool], what: Callable[[], str], progress: int) -> None:
        """Until ``reached``; the deadline starts anew whenever another rank makes progress."""
        seen, since = self.beat(progress), time.monotonic()
        while not reached():
            now = self.beat(progress)
            if now != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > STALL_SECONDS:
                raise HostFailed(f"waited {STALL_SECONDS:.0f} s for {what()}")
            time.sleep(0.05)


def under_torchrun() -> bool:
    """True when torchrun (and nothing else) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
