"""What a conversion writes to."""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from megatron_bridge.convert.journal import Place
from megatron_bridge.convert.plan import Item, Unit


class Writer(Protocol):
    """A worker's hand on the result."""

    def write(self, unit: Unit, tensor: Tensor) -> Place:
        """Write a unit's rectangle; returns what `Sink.finish` needs to find it."""
        ...

    def sync(self) -> None:
        """Bring everything written so far to the disk."""
        ...


class Sink(Protocol):
    """The result's format."""

    items: list[Item]
    """What it holds, in the order in which it is written."""

    def prepare(self, folder: Path) -> None:
        """Lay out an empty result in ``folder``; once, before any writer opens it."""
        ...

    def open(self, folder: Path, run: int, worker: str) -> Writer:
        """A writer for one worker of one run of the conversion (their pair is unique)."""
        ...

    def finish(self, folder: Path, places: list[tuple[Unit, Place]]) -> None:
        """Write what makes ``folder`` whole (index, config, metadata) and bring it to the disk."""
        ...
