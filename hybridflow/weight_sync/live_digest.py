"""The digest of a server's live parameters, by its own account or by the loader inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridflow.weight_sync.checksum import engine_digest, rank_digest


def live_digest(client: Any, device: str, folder: str | Path, tp: int) -> str:
    """What ``checksum.ServerDigest`` gives for the weights that were sent.

    On the CPU the server says it itself. On CUDA it hashes in another way, so that the loader
    inside it (see ``rollout.server_side``) copies its parameters out and hashes them.

    Args:
        client: of the paused server.
        folder: the sync folder that it was started with.
    """
    if device == "cpu":
        return client.checksum()
    statuses = client.load_through(folder, [{"operation": "digest"}] * tp, flush_cache=False)
    return engine_digest(rank_digest(status.digests) for status in statuses)
