"""Publishing a version of the weights: write it, load it in the server, prove it."""

from hybridflow.weight_sync.checksum import ServerDigest, server_checksum
from hybridflow.weight_sync.publish import PublishReport, WeightMismatch, publish
from hybridflow.weight_sync.version import remove_versions, write_version

__all__ = [
    "PublishReport",
    "ServerDigest",
    "WeightMismatch",
    "publish",
    "remove_versions",
    "server_checksum",
    "write_version",
]
