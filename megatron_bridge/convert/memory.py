"""The memory bound: how it becomes the size of a unit, and how the use of memory is measured.

Counted is anonymous resident memory (`RssAnon`: heap and stacks; not the pages of mapped files,
which the kernel drops when it needs room) of the parent and all workers together, beyond what a
process holds right after its imports.

The model, where the plan has ``tensors`` (and chunks) to read and ``units`` to write::

    parent = PARENT + tensors * TENSOR + units * UNIT
    worker = WORKER + tensors * TENSOR + units * SHARED_UNIT + COPIES * unit
    memory = parent + workers * worker
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_bridge.convert.sizes import show_binary

MIB = 2**20
PARENT = 12 * MIB
"""Progress, and what importing left for later."""
WORKER = 12 * MIB
"""What a worker holds besides plan and unit: leftovers of its allocator, a transform's blocks."""
TENSOR = 4096
"""Bytes of plan for each tensor; workers inherit the plan, and touching it copies it."""
UNIT = 4096
"""Bytes of plan, journal and metadata for each unit."""
SHARED_UNIT = 512
"""Bytes of plan for each unit that a worker touches."""
COPIES = 4
"""Most copies of a unit alive at once: the parts that are read, the rectangle assembled from them,
its cast, and one for a transform on the way (dequantising, merging an adapter)."""
SMALLEST_UNIT = MIB
LARGEST_UNIT = 8 * MIB
"""Larger units are slower: they leave the processor's caches."""


@dataclass(frozen=True)
class Budget:
    """A memory bound shared out over workers.

    Attributes:
        memory: bytes that all processes together may hold.
        workers: processes beside the parent.
        tensors: tensors and chunks that the conversion reads.
        rectangles: parts of tensors that it writes; each is one unit at least.
        bytes: what it writes, elements counted as float32 at least.
    """

    memory: int
    workers: int
    tensors: int
    rectangles: int
    bytes: int

    def needed(self, unit: int) -> int:
        """The bound that units of so many bytes need."""
        units = self.rectangles + self.bytes // unit
        parent = PARENT + self.tensors * TENSOR + units * UNIT
        worker = WORKER + self.tensors * TENSOR + units * SHARED_UNIT + COPIES * unit
        return parent + self.workers * worker

    def unit_bytes(self) -> int:
        """Most bytes of a unit.

        Raises:
            ValueError: when the bound is too small.
        """
        fitting = [unit for unit in _units() if self.needed(unit) <= self.memory]
        if fitting:
            return max(fitting)
        raise ValueError(
            f"--memory {show_binary(self.memory)} is too small for {self.workers} "
            f"worker{'s' if self.workers > 1 else ''}: the least that works is "
            f"{show_binary(self.least)}{self._fewer()}"
        )

    @property
    def least(self) -> int:
        """The smallest bound that works."""
        return min(self.needed(unit) for unit in _units())

    def _fewer(self) -> str:
        if self.workers == 1:
            return ""
        one = Budget(self.memory, 1, self.tensors, self.rectangles, self.bytes).least
        return f", or {show_binary(one)} with --workers 1"


def _units() -> Iterator[int]:
    """The sizes that units may have."""
    unit = SMALLEST_UNIT
    while unit <= LARGEST_UNIT:
        yield unit
        unit *= 2


def anonymous_bytes(pid: int | str = "self") -> int:
    """Anonymous resident memory of a process; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:  # of no layout for people: read in no time
            resident, of_files = file.read().split()[1:3]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (int(resident) - int(of_files)) * mmap.PAGESIZE


class Meter:
    """The peak of all processes together, beyond what each holds right after its imports.

    Two figures, of which the larger counts: the largest sum seen at one time, and the sum of what
    each process held at most by its own account.

    Make it right after the imports.
    """

    def __init__(self) -> None:
        self.baseline = anonymous_bytes()
        self._own = self._seen = 0
        self._workers: dict[int, int] = {}

    def note(self, worker: int, anonymous: int) -> None:
        """A worker tells its peak."""
        self._workers[worker] = max(self._workers.get(worker, 0), self._beyond(anonymous))

    def sample(self, pids: list[int]) -> int:
        """What this process and its workers hold together, now."""
        own = self._beyond(anonymous_bytes())
        self._own = max(self._own, own)
        now = own + sum(self._beyond(anonymous_bytes(pid)) for pid in pids)
        self._seen = max(self._seen, now)
        return now

    @property
    def peak(self) -> int:
        """Bytes."""
        return max(self._seen, self._own + sum(self._workers.values()))

    def _beyond(self, anonymous: int) -> int:
        return max(anonymous - self.baseline, 0)
