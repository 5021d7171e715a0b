"""What is asked of a conversion, and what became of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bridge.convert.sink import Sink
from megatron_bridge.source import Source


@dataclass(frozen=True)
class Job:
    """What is converted into what.

    Attributes:
        source: gives the result's tensors under their names.
        sink: takes them.
        files: of the source; none may change meanwhile.
        options: what else decides the result; a resumed conversion must have the same.
        tensors: number of tensors and chunks that are read; they decide the size of the plan.
    """

    source: Source
    sink: Sink
    files: Callable[[], list[Path]]
    options: dict[str, Any]
    tensors: int


@dataclass(frozen=True)
class Limits:
    """How much of the machine a conversion may use, and what it may replace.

    Attributes:
        memory: bytes of anonymous memory on each host.
        workers: processes of each torchrun rank, or of this host.
        resume: continue what was cut short.
        overwrite: replace an existing destination.
        shown: show progress.
    """

    memory: int
    workers: int
    resume: bool = False
    overwrite: bool = False
    shown: bool = True


@dataclass(frozen=True)
class Result:
    """What was done.

    Attributes:
        destination: where the result is.
        tensors, bytes: of the whole result.
        seconds: of this run.
        resumed: bytes that earlier runs had done.
        peak: largest anonymous memory of all processes on this host together, beyond the
            interpreter's own.
        memory: the bound on it.
    """

    destination: str
    tensors: int
    bytes: int
    seconds: float
    resumed: int
    peak: int
    memory: int

    @property
    def speed(self) -> float:
        """Bytes per second of this run."""
        return (self.bytes - self.resumed) / max(self.seconds, 1e-9)
