"""Writes a Megatron-LM save folder: `release/` as torch_dist, `huggingface/` with what goes along.

``--load`` of Megatron-LM takes the folder as it is.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatron_bridge.convert.journal import Place
from megatron_bridge.convert.kinds import COMPANIONS, LATEST
from megatron_bridge.convert.plan import Item, Unit
from megatron_bridge.convert.sources import CARRIED, Opened, Renamed, Together
from megatron_bridge.huggingface.write import copy_others
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.registry import HfConfig
from megatron_bridge.source import Ranges, Source, whole
from megatron_bridge.torch_dist.writer import ChunkFile, ChunkRecord, finish
from megatron_bridge.views import HuggingFaceAsMegatron, chunks

RELEASE = "release"
LAYOUT = "bridge_layout"
"""The entry of common.pt with the layout that the chunks were cut for."""


def as_megatron(opened: Opened, layout: ParallelLayout | None) -> Source:
    """The tensors by their keys in a Megatron checkpoint, those carried along included."""
    source = opened.source
    view = HuggingFaceAsMegatron(source, opened.config, layout or ParallelLayout())
    carried = Renamed(source, {CARRIED + name: name for name in opened.carried})
    return Together((view, carried))


class MegatronSink:
    """A torch_dist checkpoint with a chunk for each unit.

    Args:
        source: from `as_megatron`.
        config: config.json, as it goes into ``huggingface/``.
        companions: the folder whose tokenizer and the like go along.
        layout: the ranks whose rectangles become chunks; None: whole tensors, layer by layer.
    """

    def __init__(
        self, source: Source, config: HfConfig, companions: Path, layout: ParallelLayout | None
    ) -> None:
        self._config, self._companions, self._layout = config, companions, layout
        rectangles: dict[str, list[Ranges]] = {}
        for key, ranges in chunks(config, layout or ParallelLayout()):
            rectangles.setdefault(key, []).append(ranges)
        self.items = [
            Item(key, info.dtype, info.shape, tuple(rectangles.get(key, [whole(info.shape)])))
            for key, info in source.tensors().items()
        ]

    def prepare(self, folder: Path) -> None:
        """See `Sink`."""
        (folder / RELEASE).mkdir()

    def open(self, folder: Path, run: int, worker: str) -> "_ChunkWriter":
        """See `Sink`."""
        return _ChunkWriter(folder / RELEASE / f"__{worker}_{run}.distcp")

    def finish(self, folder: Path, places: list[tuple[Unit, Place]]) -> None:
        """See `Sink`."""
        records = [ChunkRecord.from_json(place) for _, place in places]
        _drop_unrecorded(folder / RELEASE, records)
        layout = {} if self._layout is None else {LAYOUT: str(self._layout)}
        infos = {item.name: item.info for item in self.items}
        finish(folder / RELEASE, infos, records, layout)
        (folder / COMPANIONS).mkdir(exist_ok=True)
        text = json.dumps(self._config, indent=2, sort_keys=True) + "\n"
        (folder / COMPANIONS / "config.json").write_text(text)
        copy_others(self._companions, folder / COMPANIONS)
        (folder / LATEST).write_text(f"{RELEASE}\n")


class _ChunkWriter:
    """Appends the units of one worker to its file."""

    def __init__(self, path: Path) -> None:
        self._file = ChunkFile(path)

    def write(self, unit: Unit, tensor: Tensor) -> Place:
        offsets = [low for low, _ in unit.ranges]
        try:
            return self._file.add(unit.item.name, offsets, tensor).to_json()
        except OSError as error:  # the system knows a number, people want the place
            raise OSError(error.errno, error.strerror, str(self._file.path)) from error

    def sync(self) -> None:
        self._file.sync()


def _drop_unrecorded(folder: Path, records: list[ChunkRecord]) -> None:
    """Cut off what a killed worker wrote and nobody noted; remove files without any chunk."""
    ends: dict[str, int] = {}
    for record in records:
        ends[record.file] = max(ends.get(record.file, 0), record.end)
    for path in folder.glob("*.distcp"):
        if path.name not in ends:
            path.unlink()
        elif path.stat().st_size > ends[path.name]:
            with open(path, "r+b") as file:
                file.truncate(ends[path.name])


def layout_of(common: Mapping[str, object]) -> str | None:
    """The layout that a checkpoint of ours was cut for."""
    found = common.get(LAYOUT)
    return found if isinstance(found, str) else None
