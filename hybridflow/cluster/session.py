"""What a session is, whether its workers run on Ray, under torchrun or in this process."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from hybridflow.cluster.errors import ClusterError
from hybridflow.cluster.group import CLOSE_SECONDS, Ranks, WorkerGroup
from hybridflow.cluster.host import init_arguments
from hybridflow.cluster.transfer import Piece
from megatron_bridge.layout import ParallelLayout


class Place(NamedTuple):
    """Where a slot is.

    Attributes:
        node: id of its machine; slots of one node are neighbours.
        gpu: number of its GPU there; None where slots are no GPUs.
    """

    node: str
    gpu: int | None = None


@dataclass(frozen=True)
class Pool:
    """Device slots that groups may share, each in its place; ``handle`` is the session's own."""

    name: str
    places: tuple[Place, ...]
    handle: Any = None

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self.places)


@dataclass(frozen=True)
class GroupOrder:
    """What a session is asked to start; see ``Session.group``.

    Attributes:
        independent: its workers are no ranks of one layout.
        init: the workers' own keyword arguments.
    """

    name: str
    worker_class: type
    layout: ParallelLayout
    independent: bool
    pool: Pool | None
    init: Piece
    threads: int
    first_slot: int

    def slots(self) -> range:
        """The pool's slots that it takes, none without a pool; ``ValueError`` when it has not as
        many."""
        if self.pool is None:
            return range(0)
        end = self.first_slot + self.layout.world
        if self.first_slot < 0 or end > self.pool.slots:
            begin = f" from slot {self.first_slot} on" if self.first_slot else ""
            raise ValueError(
                f"group '{self.name}': {self.layout.world} ranks do not fit pool "
                f"'{self.pool.name}' of {self.pool.slots} slots{begin}"
            )
        return range(self.first_slot, end)


class Session(ABC):
    """Owns pools and groups; leaving its ``with`` block closes everything.

    Timeouts are in seconds: of a worker's constructor, and of a call that states no other.
    """

    def __init__(self, start_timeout: float, call_timeout: float) -> None:
        self._start_seconds, self._call_seconds = start_timeout, call_timeout
        self._register = GroupRegister()

    @abstractmethod
    def pool(self, name: str, slots: int) -> Pool:
        """Reserves device slots. ``ValueError`` when there are not as many left."""

    def group(
        self,
        name: str,
        worker_class: type,
        layout: ParallelLayout | int,
        pool: Pool | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
        *,
        threads: int = 1,
        first_slot: int = 0,
    ) -> WorkerGroup:
        """Starts one worker per rank of the layout (a number: that many independent workers) and
        returns at once; calls queue behind the workers' constructors.

        Rank r takes the pool's slot ``first_slot`` + r; groups on one pool share its devices.
        Without a pool the workers take no device. A constructor gets ``rank``, ``world`` and
        ``rendezvous`` (host, port) and ``init_kwargs``. ``threads`` is the number of threads of a
        worker's maths, where it has a process of its own. The name of a group that is over may be
        taken again. Threads may call this while another closes the session: a group that starts
        too late raises ``ClusterError``.
        """
        with self._register.claim(name):
            order = GroupOrder(
                name,
                worker_class,
                _as_layout(name, layout),
                not isinstance(layout, ParallelLayout),
                pool,
                init_arguments(init_kwargs),
                threads,
                first_slot,
            )
            group = WorkerGroup(
                name,
                worker_class,
                order.layout,
                self._ranks(order),
                start_seconds=self._start_seconds,
                call_seconds=self._call_seconds,
                waiters=order.layout.world if order.independent else 1,
            )
            return self._register.add(group)

    @abstractmethod
    def _ranks(self, order: GroupOrder) -> Ranks:
        """How the new group reaches its workers; ``ValueError`` when this session cannot have
        such a group."""

    @abstractmethod
    def close(self) -> None:
        """Ends every process of the session. Safe to call again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Closes; an error that is on its way stays the one that is raised, and a problem of the
        clean-up becomes a note of it."""
        try:
            self.close()
        except Exception as problem:
            if error is None:
                raise
            error.add_note(f"closing the session failed too: {problem}")


def _as_layout(name: str, layout: ParallelLayout | int) -> ParallelLayout:
    """A number of independent workers as a layout."""
    if isinstance(layout, ParallelLayout):
        return layout
    if layout < 1:
        raise ValueError(f"group '{name}': at least one worker is needed, got {layout}")
    return ParallelLayout(dp=layout)


class GroupRegister:
    """The groups of a session by name, and closing them all. Threads may share it."""

    def __init__(self) -> None:
        self._groups: dict[str, WorkerGroup] = {}
        self._closed = False
        self._lock = threading.RLock()  # a group starts before a session closes, or not at all

    @contextmanager
    def claim(self, name: str) -> Iterator[None]:
        """Holds the name while its group is made. ``ValueError`` when a group that is not over
        has it, ``ClusterError`` when the session is closed."""
        with self._lock:
            if self._closed:
                raise ClusterError(f"group '{name}' cannot start: its session is closed")
            if name in self._groups and not self._groups[name].over:
                raise ValueError(f"the session has a group '{name}' already; choose another name")
            yield

    def add(self, group: WorkerGroup) -> WorkerGroup:
        """Registers a new group."""
        self._groups[group.role] = group
        return group

    def working(self) -> set[str]:
        """Names of the groups that are not over."""
        return {name for name, group in self._groups.items() if not group.over}

    def close(self) -> list[Exception]:
        """Closes every group, all within one deadline; what went wrong is returned, so that the
        rest of a session can be closed before it is raised."""
        with self._lock:
            self._closed = True
        problems: list[Exception] = []
        for group in self._groups.values():
            try:
                group.begin_close()
            except Exception as error:  # noqa: BLE001 - as below
                problems.append(error)
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._groups:
            _, group = self._groups.popitem()
            try:
                group.close(max(0.1, deadline - time.monotonic()))
            except Exception as error:  # noqa: BLE001 - raised by the session after the clean-up
                problems.append(error)
        return problems
