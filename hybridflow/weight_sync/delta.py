"""Versions on a shared disk as deltas.

The trainer writes with a ``VersionWriter``; a rollout worker asks ``whole_version`` for a folder
to load. ``NeedsFull`` tells that the trainer must write a full version.
"""

from hybridflow.weight_sync.delta_manifest import NeedsFull, is_delta
from hybridflow.weight_sync.delta_read import apply_deltas, whole_version
from hybridflow.weight_sync.delta_write import VersionWriter

__all__ = ["NeedsFull", "VersionWriter", "apply_deltas", "is_delta", "whole_version"]
