"""What a delta holds, which version it needs, and the chain back to a full version.

A delta is a folder ``v<N>`` of two files: ``delta.json`` (this manifest) and ``delta.data`` (the
changed blocks of all tensors, one behind the other). A full version has ``model.safetensors``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.weight_sync.delta_block import BLOCK_BYTES, KINDS

MANIFEST, DATA, WEIGHTS = "delta.json", "delta.data", "model.safetensors"
_FORMAT = 1
_MOST_PAYLOAD = 2 * BLOCK_BYTES


class NeedsFull(RuntimeError):
    """A version cannot be built from what there is: the trainer must write a full one."""

    def __init__(self, version: int, why: str) -> None:
        super().__init__(
            f"version {version} cannot be built from a delta: {why}. Write a full version."
        )
        self.version = version


@dataclass(frozen=True)
class TensorDelta:
    """The change of one tensor.

    Attributes:
        dtype, shape: as safetensors writes them.
        base, result: SHA-256 of the raw bytes before and after.
        begin: of its first block in ``delta.data``, in bytes.
        blocks: kind and payload bytes of each block; empty when nothing changed.
    """

    dtype: str
    shape: tuple[int, ...]
    base: str
    result: str
    begin: int
    blocks: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        """Bytes in ``delta.data``."""
        return sum(length for _, length in self.blocks)


@dataclass(frozen=True)
class Manifest:
    """A delta from ``base_version`` to ``version``."""

    version: int
    base_version: int
    tensors: Mapping[str, TensorDelta]

    @property
    def bytes(self) -> int:
        """Bytes of ``delta.data``."""
        return sum(tensor.bytes for tensor in self.tensors.values())

    def digest(self, side: str) -> str:
        """SHA-256 over names, dtypes, shapes and bytes of all tensors; ``base`` or ``result``."""
        total = hashlib.sha256()
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            described = [name, tensor.dtype, tensor.shape, getattr(tensor, side)]
            total.update(json.dumps(described).encode())
        return total.hexdigest()

    def text(self) -> str:
        """As ``delta.json``."""
        content = {
            "format": _FORMAT,
            "block_bytes": BLOCK_BYTES,
            "version": self.version,
            "base_version": self.base_version,
            "base": self.digest("base"),
            "result": self.digest("result"),
            "tensors": {name: vars(tensor) for name, tensor in self.tensors.items()},
        }
        return json.dumps(content) + "\n"


def is_delta(folder: Path) -> bool:
    """Whether a version's folder holds a delta."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path, version: int) -> Manifest:
    """The manifest of the delta ``folder`` of ``version``, checked against its own digests.

    Raises:
        NeedsFull: it is damaged, of another format or version, or its data is cut off.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text())
        data_bytes = (folder / DATA).stat().st_size
        manifest = _manifest(content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NeedsFull(
            version, f"{folder} is damaged ({type(error).__name__}: {error})"
        ) from error
    if manifest.version != version or not 0 <= manifest.base_version < version:
        raise NeedsFull(
            version,
            f"{folder} goes from version {manifest.base_version} to {manifest.version}",
        )
    if manifest.bytes != data_bytes:
        raise NeedsFull(version, f"{folder / DATA} has {data_bytes} of {manifest.bytes} bytes")
    return manifest


def _manifest(content: dict[str, Any]) -> Manifest:
    if (content["format"], content["block_bytes"]) != (_FORMAT, BLOCK_BYTES):
        raise ValueError(f"format {content['format']} with blocks of {content['block_bytes']}")
    tensors = {name: _tensor(fields) for name, fields in content["tensors"].items()}
    manifest = Manifest(int(content["version"]), int(content["base_version"]), tensors)
    for side in ("base", "result"):
        if manifest.digest(side) != content[side]:
            raise ValueError(f"its digest of the {side} is not that of its tensors")
    return manifest


def _tensor(fields: dict[str, Any]) -> TensorDelta:
    blocks = tuple((str(kind), int(length)) for kind, length in fields["blocks"])
    sized = all(kind in KINDS and 0 <= length <= _MOST_PAYLOAD for kind, length in blocks)
    if not sized or fields["begin"] < 0:
        raise ValueError("a block of unknown kind or impossible size")
    return TensorDelta(
        str(fields["dtype"]),
        tuple(int(size) for size in fields["shape"]),
        str(fields["base"]),
        str(fields["result"]),
        int(fields["begin"]),
        blocks,
    )


def chain(directory: str | Path, version: int, held: Collection[int] = ()) -> list[int]:
    """The versions that ``version`` is built from, ascending: a full one, then deltas.

    The first one is in ``held`` (full versions elsewhere) or has a whole folder in ``directory``.

    Raises:
        NeedsFull: a version of the chain is missing or damaged.
    """
    found = [version]
    while found[0] not in held:
        folder = Path(directory) / f"v{found[0]}"
        if is_delta(folder):
            found.insert(0, read_manifest(folder, found[0]).base_version)
        elif (folder / WEIGHTS).is_file():
            break
        else:
            raise NeedsFull(version, f"{folder}, which it needs, is missing or not whole")
    return found
