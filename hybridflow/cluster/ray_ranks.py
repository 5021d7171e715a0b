"""A group's ranks as Ray actors. Imported only after Ray was set up (see ``ray_runtime``)."""

import faulthandler
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from hybridflow.batch import Batch
from hybridflow.cluster.host import (
    Death,
    Failure,
    Node,
    Outcome,
    Rendezvous,
    WorkerHost,
    free_port,
    set_this_node,
)
from hybridflow.cluster.transfer import Piece

LOG_LINES = 20
BESIDE = "beside"
"""The thread of calls that run beside others; see ``transfer``."""

SMALL_BYTES = 64 << 10
"""Rows up to here travel within the call: the way through the object store takes as long again as
the call, and is worth it where ranks share what lies there."""

FOREIGN_VARIABLES = ("TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")
"""Beginnings of the names that torchrun sets: where Ray was started under torchrun, they would
make torch look for a rendezvous of that job instead of the group's."""


@dataclass(frozen=True)
class Surroundings:
    """What a worker's process takes over from its driver; ``log`` is the file of its output."""

    directory: str
    python_path: tuple[str, ...]
    log: str
    address: str | None

    def enter(self) -> None:
        """Makes the driver's modules importable, and sends the output to the log."""
        for name in [name for name in os.environ if name.startswith(FOREIGN_VARIABLES)]:
            del os.environ[name]
        if Path(self.directory).is_dir():
            os.chdir(self.directory)
        sys.path.extend(path for path in self.python_path if path not in sys.path)
        Path(self.log).parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        faulthandler.enable(file=2)


class ActorHost(WorkerHost):
    """One rank's process."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__()
        surroundings.enter()
        self._address = surroundings.address
        node = Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())
        set_this_node(node)
        if self._address is None:
            _meet_at(node.address)

    def rendezvous(self) -> Rendezvous:
        """Where the group meets: an address of this node and a port that is free on it."""
        return self._address or ray.util.get_node_ip_address(), free_port()

    def timed(self, step: str, seconds: float, *args: Any) -> Outcome:
        """``start`` or ``call``; shortly before the deadline every thread's stack goes to the
        log, so that a hang can be read there."""
        faulthandler.dump_traceback_later(max(0.1, min(seconds * 0.9, seconds - 1)), file=2)
        try:
            return getattr(self, step)(*args)
        finally:
            faulthandler.cancel_dump_traceback_later()


class ActorRanks:
    """``Ranks`` as actors, made in parallel; ``options`` are each rank's, ``end`` ends whatever
    the group's processes have left behind."""

    def __init__(
        self,
        worker_class: type,
        init: Piece,
        options: Sequence[Mapping[str, Any]],
        surroundings: Sequence[Surroundings],
        end: Callable[[], None],
    ) -> None:
        # Threads of an actor that needs none would bury the hanging one's stack in its log.
        methods = (getattr(worker_class, name) for name in dir(worker_class))
        beside = any(getattr(method, "beside", False) for method in methods)
        threads = {"concurrency_groups": {BESIDE: 1}} if beside else {}
        actor = cast(Any, ray.remote)(max_restarts=0, **threads)(ActorHost)
        self._actors: list[Any] = [
            actor.options(**dict(option)).remote(place)
            for option, place in zip(options, surroundings, strict=True)
        ]
        self._logs = [place.log for place in surroundings]
        self._class = ray.put(worker_class)
        self._init = ray.put(init)
        self._rendezvous = self._actors[0].rendezvous.remote()
        self._end = end

    def share(self, piece: Piece) -> Any:
        return ray.put(piece) if _rows_bytes(piece) > SMALL_BYTES else piece

    def start(self, rank: int, seconds: float) -> Any:
        world = len(self._actors)
        return self._actors[rank].timed.remote(
            "start", seconds, self._class, rank, world, self._rendezvous, self._init
        )

    def submit(self, rank: int, method: str, shared: Any, seconds: float, beside: bool) -> Any:
        actor = self._actors[rank]
        if beside:  # the one timer of stacks is the other lane's
            return actor.call.options(concurrency_group=BESIDE).remote(method, shared)
        return actor.timed.remote("call", seconds, method, shared)

    def stop(self, rank: int) -> Any:
        return self._actors[rank].stop.remote()

    def wait(self, pending: Sequence[Any], seconds: float, everything: bool) -> list[Any]:
        if not pending:
            return []
        count = len(pending) if everything else 1
        return ray.wait(list(pending), num_returns=count, timeout=seconds)[0]

    def outcome(self, pending: Any) -> Outcome:
        try:
            return ray.get(pending)
        except RayTaskError as error:  # arguments or the result could not be pickled, say
            return Failure(type(error.cause).__name__, str(error.cause), str(error), 0.0)
        except RayError as error:
            return Death(_cause(str(error)))

    def log_tail(self, rank: int) -> str:
        log = Path(self._logs[rank])
        if not log.is_file():
            return ""
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64_000))
            lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"last lines of {log}:", *lines]) if lines else ""

    def kill(self) -> None:
        try:
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
        finally:
            self._end()


def _rows_bytes(piece: Piece) -> int:
    """Bytes of the batches among a call's arguments; all else is small."""
    values = (*piece.args, *piece.kwargs.values())
    return sum(value.nbytes for value in values if isinstance(value, Batch))


def _meet_at(address: str) -> None:
    """Has gloo use the interface of ``address``, unless the environment names one: by itself it
    takes what the host's name resolves to, which /etc/hosts often makes a loopback address."""
    for interface, addresses in psutil.net_if_addrs().items():
        if address in (found.address for found in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _cause(text: str) -> str:
    """Ray's account of a death on one line: the process and how it ended, where it says so."""
    account = " ".join(text.split("Some common causes include")[0].split())
    pid = re.search(r"\bpid: (\d+)", account)
    detail = account.partition("Worker exit detail: ")[2]
    return f"process {pid[1]} is gone: {detail}" if pid and detail else account
