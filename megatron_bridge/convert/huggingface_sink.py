"""Writes a HuggingFace folder: safetensors shards, index, config, tokenizer and the like."""

from pathlib import Path

from torch import Tensor

from megatron_bridge.convert.journal import Place
from megatron_bridge.convert.plan import Item, Unit
from megatron_bridge.huggingface.shards import plan_shards
from megatron_bridge.huggingface.write import SafetensorsFolder
from megatron_bridge.registry import HfConfig
from megatron_bridge.source import Source, whole


class HuggingFaceSink:
    """Headers first, then every unit at its place.

    Args:
        source: of HuggingFace tensors.
        config: config.json, as it is written.
        companions: the folder whose tokenizer and the like go along.
        shard_bytes: most bytes of a file.
    """

    def __init__(
        self, source: Source, config: HfConfig, companions: Path, shard_bytes: int
    ) -> None:
        self._config, self._companions, self._shard_bytes = config, companions, shard_bytes
        self.items = [
            Item(name, info.dtype, info.shape, (whole(info.shape),), file)
            for file, shard in enumerate(plan_shards(source.tensors(), shard_bytes))
            for name, info in shard.items()
        ]

    def prepare(self, folder: Path) -> None:
        """See `Sink`."""
        tensors = {item.name: item.info for item in self.items}
        SafetensorsFolder.create(folder, tensors, shard_bytes=self._shard_bytes)

    def open(self, folder: Path, run: int, worker: str) -> "_RectangleWriter":
        """See `Sink`."""
        return _RectangleWriter(SafetensorsFolder(folder))

    def finish(self, folder: Path, places: list[tuple[Unit, Place]]) -> None:
        """See `Sink`."""
        SafetensorsFolder(folder).finish(self._config, self._companions)


class _RectangleWriter:
    """Writes units in place; where they lie is known beforehand."""

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder = folder

    def write(self, unit: Unit, tensor: Tensor) -> Place:
        self._folder.write(unit.item.name, unit.ranges, tensor)

    def sync(self) -> None:
        self._folder.flush()
