"""Publishing a version of the weights: send it, load it in the server, prove it."""

from hybridflow.weight_sync.checksum import ServerDigest, server_checksum
from hybridflow.weight_sync.inbox import WeightMismatch
from hybridflow.weight_sync.version import remove_versions, write_version

__all__ = [
    "ServerDigest",
    "WeightMismatch",
    "remove_versions",
    "server_checksum",
    "write_version",
]
