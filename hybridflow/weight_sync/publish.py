"""Publishing one version to a server and proving it before it serves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class PublishTarget(Protocol):
    """What publishing asks of a rollout server's client."""

    url: str

    def pause(self, mode: str = ...) -> None: ...
    def update_from_disk(self, folder: str | Path, version: int | None = ...) -> None: ...
    def checksum(self) -> str: ...
    def set_version(self, version: int) -> None: ...
    def continue_(self) -> None: ...


class WeightMismatch(RuntimeError):
    """A server's live parameters are not what the trainer sent. The server stays paused."""


@dataclass(frozen=True)
class PublishReport:
    """What one publish did: bytes of weights, and seconds by phase."""

    version: int
    bytes: int
    checksum: str
    seconds: dict[str, float] = field(default_factory=dict)


def publish(
    client: PublishTarget, folder: str | Path, version: int, expected: str
) -> PublishReport:
    """Load `folder` into the server, compare checksums, then serve it as `version`.

    Running requests are put back into the server's queue and go on under the new weights; a
    response carries every version that produced it. On a mismatch the server stays paused and
    keeps the old version's name; publish again to mend it.
    """
    seconds: dict[str, float] = {}

    def timed(phase: str, action, *arguments):
        start = time.perf_counter()
        result = action(*arguments)
        seconds[phase] = time.perf_counter() - start
        return result

    timed("pause", client.pause, "retract")
    timed("load", client.update_from_disk, folder)
    actual = timed("verify", client.checksum)
    if actual != expected:
        raise WeightMismatch(
            f"{client.url} holds other weights than version {version} in {folder}: its checksum is "
            f"{actual[:16]}, the trainer's is {expected[:16]}. The server stays paused and the "
            "version is not activated."
        )
    timed("activate", client.set_version, version)
    timed("continue", client.continue_)
    return PublishReport(version, _weight_bytes(Path(folder)), actual, seconds)


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
