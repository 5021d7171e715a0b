"""Slots: files in shared memory that hold an engine rank's whole shard in the server's own layout.

Trainer ranks write into a slot while the server generates; a loader inside the server copies it
into the live parameters. What no trainer rank writes is padding, zero since the slot was made.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridflow.weight_sync.checksum import rank_digest, tensor_digest

if TYPE_CHECKING:
    from megatron_bridge.reshard import TargetParameter

_ALIGNMENT = 64  # bytes; a cache line, and a multiple of every dtype's size


@dataclass(frozen=True)
class Place:
    """One parameter's place in a slot; `offset` and `bytes` in bytes, row-major."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    bytes: int

    @property
    def dtype_name(self) -> str:
        """As in config.json: "float32"."""
        return str(self.dtype).removeprefix("torch.")


class SlotLayout:
    """Where each parameter of one engine rank lies in its slot; `dtype` is the model's."""

    def __init__(self, parameters: Sequence[TargetParameter], dtype: torch.dtype) -> None:
        places, at = [], 0
        for parameter in parameters:
            kept = getattr(torch, parameter.dtype) if parameter.dtype else dtype
            size = prod(parameter.shape) * kept.itemsize
            places.append(Place(parameter.name, kept, tuple(parameter.shape), at, size))
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.places: tuple[Place, ...] = tuple(places)
        self.bytes = at

    def entries(self) -> list[list]:
        """The layout in the loader's words: [name, dtype, shape, offset] of each parameter."""
        return [[p.name, p.dtype_name, list(p.shape), p.offset] for p in self.places]


class Slot:
    """An open slot, mapped into this process."""

    def __init__(self, path: Path, layout: SlotLayout, descriptor: int) -> None:
        self.path, self.layout = path, layout
        self._made = os.fstat(descriptor)
        self._bytes: Tensor | None = torch.frombuffer(
            mmap.mmap(descriptor, layout.bytes), dtype=torch.uint8
        )

    def tensor(self, parameter: int) -> Tensor:
        """The parameter's tensor: a view of the slot."""
        assert self._bytes is not None, f"{self.path} was closed"
        place = self.layout.places[parameter]
        held = self._bytes[place.offset : place.offset + place.bytes]
        return held.view(place.dtype).view(place.shape)

    def is_there(self) -> bool:
        """Whether its file is still at its path; who maps it does not notice when it goes."""
        try:
            return os.path.samestat(self.path.lstat(), self._made)
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let the map go; it ends with the last tensor that was taken from it."""
        self._bytes = None


def create_slot(path: str | Path, layout: SlotLayout, among: str = "") -> Slot:
    """Make a zeroed slot that only this user reads, all of its memory reserved.

    Args:
        among: says in an error what else is to find room there.

    Raises:
        ValueError: when the file exists, or the folder has too little room. Without the
            reservation a full folder would be a SIGBUS in whoever writes into the slot.
    """
    path = Path(path)
    reserve_file(path, layout.bytes, f"the slot of {len(layout.places)} parameters{among}")
    return open_slot(path, layout)


def open_slot(path: str | Path, layout: SlotLayout) -> Slot:
    """Map a slot that `create_slot` made.

    Raises:
        ValueError: when it is missing, of another size, a link, or another user's.
    """
    path = Path(path)
    descriptor = open_reserved(path, layout.bytes)
    try:
        return Slot(path, layout, descriptor)
    finally:
        os.close(descriptor)


def slot_digests(slot: Slot) -> dict[str, str]:
    """Each parameter's digest, as a server shows it of its live parameters."""
    return {
        place.name: tensor_digest(slot.tensor(index))
        for index, place in enumerate(slot.layout.places)
    }


def slot_rank_digest(slot: Slot) -> str:
    """The rank's digest, as a server shows it of its live parameters."""
    return rank_digest(slot_digests(slot))


def reserve_file(path: Path, size: int, purpose: str) -> None:
    """Make a zeroed file of `size` bytes with its memory reserved; `purpose` names it in errors.

    Raises:
        ValueError: when it exists or the folder has too little room.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ValueError(f"{path} exists already; {purpose} is made once.") from error
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink()
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM):
            raise
        raise ValueError(_no_room(path, size, purpose, error)) from error
    finally:
        os.close(descriptor)


def open_reserved(path: Path, size: int) -> int:
    """A descriptor of a file that `reserve_file` made, checked; the caller closes it.

    Raises:
        ValueError: when it is missing, of another size, a link, or another user's.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"{path} cannot be opened: {error.strerror}.") from error
    found = os.fstat(descriptor)
    faults = []
    if not stat.S_ISREG(found.st_mode):
        faults.append("it is no regular file")
    if found.st_uid != os.geteuid():
        faults.append(f"it belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_size != size:
        faults.append(f"it has {found.st_size} bytes, not {size}")
    if faults:
        os.close(descriptor)
        raise ValueError(f"{path}: " + "; ".join(faults) + ".")
    return descriptor


def _no_room(path: Path, size: int, purpose: str, error: OSError) -> str:
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize
    return (
        f"{path.parent} has no room for {purpose}: {size / 1e6:.1f} MB are needed, "
        f"{free / 1e6:.1f} MB are free ({error.strerror}). Free some, give the folder more, or set "
        "another roles.rollout.sync.directory."
    )
