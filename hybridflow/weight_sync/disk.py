"""Versions through a folder that trainer and servers both see: whole HuggingFace tensors.

Trainer rank 0 gathers and writes; each server loads the folder by itself, so that any server takes
it whatever its own layout. The files are proven before the server loads them, and what it then
holds after, both by digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridflow.weight_sync.checksum import ServerDigest
from hybridflow.weight_sync.delta import VersionWriter, whole_version
from hybridflow.weight_sync.disk_proof import TensorHashes, require_tensors
from hybridflow.weight_sync.inbox import WeightMismatch
from hybridflow.weight_sync.live_digest import live_digest
from hybridflow.weight_sync.version import remove_versions
from hybridflow.weight_sync.wiring import Wiring

Export = Callable[[], Iterator[tuple[str, Tensor]]]
"""Whole HuggingFace tensors on rank 0, nothing on the others; every rank exhausts it."""


@dataclass(frozen=True)
class WrittenVersion:
    """A version on disk, and the digest that a server must show for it.

    Attributes:
        bytes: written for it.
        tensors: SHA-256 of each tensor of a full version; a delta has its own.
    """

    version: int
    checksum: str
    bytes: int
    tensors: Mapping[str, str]


class DiskOutbox:
    """The trainer's side.

    Args:
        local: a folder of this host, for the last version's bytes where deltas are written.
    """

    def __init__(self, wiring: Wiring, rank: int, export: Export, local: Path) -> None:
        self._wiring, self._rank, self._export = wiring, rank, export
        self._directory = Path(wiring.sync.directory)
        self._writer: VersionWriter | None = None
        self._written: int | None = None
        if rank == 0:
            every = wiring.sync.full_every or 1
            self._writer = VersionWriter(self._directory, wiring.model_path, local, every)

    def send(self, endpoints: Mapping[int, Any], version: int) -> WrittenVersion | None:
        """Write ``directory``/v``version``; rank 0 says what it wrote.

        The same version once more is a full one in its place: somebody could not use the first.
        """
        weights = self._export()
        if self._writer is None:
            for _ in weights:
                raise AssertionError("only rank 0 receives exported weights")
            return None
        again = version == self._written
        if not again:
            remove_versions(self._directory, keep=version - 1)
        wiring = self._wiring
        digest = ServerDigest(wiring.config, wiring.tp, wiring.ep, wiring.device)
        hashes, watched = TensorHashes(wiring.config), digest.watch(weights)
        if again or self._writer.writes_full():  # a delta has its tensors' hashes in itself
            watched = hashes.watch(watched)
        folder = self._writer.write(watched, version, full=again)
        self._written = version
        size = sum(path.stat().st_size for path in folder.iterdir() if not path.is_symlink())
        return WrittenVersion(version, digest.result(), size, hashes.tensors)

    def close(self) -> None:
        """Give the last version's bytes back."""
        if self._writer is not None:
            self._writer.close()


class DiskInbox:
    """One engine's side; ``local`` is a folder of its host, for versions built from deltas."""

    def __init__(self, wiring: Wiring, engine: int, local: Path) -> None:
        self._wiring, self._local = wiring, local
        self._directory = Path(wiring.sync.directory)
        self._ready: tuple[WrittenVersion, Path] | None = None
        self.bytes = 0

    def open(self, version: int) -> str:
        """Nothing to make ready."""
        self.bytes = 0
        return str(self._directory)

    def receive(self, version: int) -> None:
        """Nothing comes before the trainer has written all of it."""

    def prove(self, version: int, proofs: Sequence[WrittenVersion | None]) -> None:
        """Find the version whole, or build it from deltas; either way each tensor's bytes are what
        the trainer wrote.

        Raises:
            NeedsFull, WeightMismatch: they are not, or are missing.
        """
        written = proofs[0]
        assert written is not None and written.version == version, proofs
        folder = whole_version(self._directory, version, self._local)
        if folder.parent == self._directory:  # what was built from deltas is proven so far
            require_tensors(folder, written.tensors)
        self._ready, self.bytes = (written, folder), written.bytes
        remove_versions(self._local, keep=version)

    def load(self, client: Any, version: int) -> None:
        """Let the paused server load the folder."""
        client.update_from_disk(self._held(version)[1])

    def give_up(self, version: int, why: str) -> None:
        """Nobody waits: the version is on disk."""

    def check(self, client: Any, version: int, proofs: Any) -> str:
        """The digest of the server's parameters; WeightMismatch when it is not the trainer's."""
        written, folder = self._held(version)
        found = self.digest(client)
        if found != written.checksum:
            raise WeightMismatch(
                f"{client.url} holds other weights than version {version} in {folder}: its digest "
                f"is {found[:16]}, the trainer's is {written.checksum[:16]}"
            )
        return found

    def digest(self, client: Any) -> str:
        """The digest of the server's live parameters."""
        return live_digest(client, self._wiring.device, self._local, self._wiring.tp)

    def restore(self, client: Any, version: int) -> str:
        """Load the folder once more."""
        self.load(client, version)
        return self.check(client, version, None)

    def close(self) -> None:
        """The folder is the run's; nothing is held."""

    def _held(self, version: int) -> tuple[WrittenVersion, Path]:
        if self._ready is None or self._ready[0].version != version:
            raise ValueError(f"version {version} is not among what this engine has on disk")
        return self._ready
