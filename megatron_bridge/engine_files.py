"""A training run's checkpoint of one model: a safetensors file a rank, under the rank's own names.

The engine writes it (``hybridflow/megatron/checkpoint.py``) and reads it back at the same layout;
here it is a source of whole Megatron tensors, so that it can be inspected and converted without a
process of that layout. The optimizer's state lies beside the parameters and is passed over.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge import regions, translation
from megatron_bridge.huggingface.safetensors_file import SafetensorsFile
from megatron_bridge.layout import Coordinates, ExpertCoordinates, ParallelLayout
from megatron_bridge.mappings import Weight
from megatron_bridge.regions import Box, Interval
from megatron_bridge.registry import HfConfig, has_value_head
from megatron_bridge.sharding import Placement, holdings
from megatron_bridge.source import Ranges, TensorInfo
from megatron_bridge.views import keys_of

DESCRIPTION = "engine.json"
VERSION = 1
PARAMETERS = "model/"
"""Begins the name of a parameter; other tensors are the optimizer's."""


def file_name(place: Coordinates) -> str:
    """Of the parameters that a rank's tensor and pipeline coordinates place."""
    return f"tp{place.tp}_pp{place.pp}.safetensors"


def experts_file_name(place: ExpertCoordinates) -> str:
    """Of the parameters that the experts' coordinates place, where they have their own."""
    return f"etp{place.etp}_ep{place.ep}_pp{place.pp}.safetensors"


def description(folder: Path) -> dict[str, Any]:
    """``engine.json`` with its layout as an object.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    path = folder / DESCRIPTION
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["layout"] = ParallelLayout(**content["layout"])
        version = content["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if version != VERSION:
        raise ValueError(f"{path} is of version {version}; this code reads {VERSION}")
    return content


def config_of(told: Mapping[str, Any], hf_config: HfConfig) -> HfConfig:
    """The config of the model in a checkpoint: that of a critic on a base model has its head."""
    needs_head = told.get("head") == "value" and not has_value_head(hf_config)
    bias = bool(told.get("score_bias"))
    return translation.with_value_head(hf_config, bias=bias) if needs_head else hf_config


@dataclass(frozen=True)
class _Part:
    """Rows of a rank's tensor, and the box of the weight that they are."""

    file: SafetensorsFile
    name: str
    rows: Interval
    box: Box

    def read(self) -> Tensor:
        """One dimension for each axis of the weight; a view of the file."""
        others = regions.full(self.file.infos[self.name].shape[1:])
        return self.file.read(self.name, (self.rows, *others)).view(regions.lengths(self.box))


class EngineFiles:
    """The whole Megatron tensors of a run's checkpoint.

    Args:
        folder: with ``engine.json``.
        hf_config: config.json of the model.

    Raises:
        ValueError: listing parameters that the files lack; naming a damaged file.
    """

    def __init__(self, folder: Path, hf_config: HfConfig) -> None:
        told = description(folder)
        layout: ParallelLayout = told["layout"]
        config = translation.resolve(hf_config)
        self._folder, self._layout = folder, layout
        self._files: dict[str, SafetensorsFile] = {}
        self._keys = keys_of(config)
        self._placement = Placement(layout, self._keys.layers, self._keys.experts)
        lacking: list[str] = []
        self._parts: dict[tuple[str, tuple[int, ...]], list[_Part]] = {}
        for key, held in self._keys.weights.items():
            for index, weight in held.items():
                self._parts[key, index] = list(self._parts_of(weight, lacking))
        if lacking:
            shown = "; ".join(lacking[:5]) + (" and more" if len(lacking) > 5 else "")
            raise ValueError(
                f"{folder} lacks {shown}: it is of another model than this config.json tells, or "
                "the model has weights that are no parameters; then resume the run and let it "
                "export"
            )
        self._infos = {key: self._info(key) for key in self._keys.weights}

    def _parts_of(self, weight: Weight, lacking: list[str]) -> Iterator[_Part]:
        number = self._local_layer(weight)
        expert = self._placement.local_expert(weight)
        names = [n.format(layer=number, expert=expert) for n in weight.row.names]
        for owner in self._placement.owners(weight):
            found = self._find(owner.rank, names)
            if found is None:
                lacking.append(f"'{names[0]}' of rank {owner.rank}")
                continue
            for holding in holdings(weight, self._placement.tensor_parallel(weight), owner.place):
                yield _Part(*found, holding.rows, holding.box)

    def _local_layer(self, weight: Weight) -> int | None:
        """The layer's number on its pipeline rank."""
        if weight.layer is None:
            return None
        stage, layers = self._placement.stage(weight)[0], self._keys.layers
        earlier = sum(self._layout.layers_of(layers, before) for before in range(stage))
        return weight.layer - earlier

    def _find(self, rank: int, names: list[str]) -> tuple[SafetensorsFile, str] | None:
        files = (
            experts_file_name(self._layout.expert_coordinates(rank)),
            file_name(self._layout.coordinates(rank)),
        )
        for file, name in itertools.product(files, names):
            opened = self._open(file)
            if opened is not None and f"{PARAMETERS}{name}" in opened.infos:
                return opened, f"{PARAMETERS}{name}"
        return None

    def _open(self, name: str) -> SafetensorsFile | None:
        if name not in self._files and (self._folder / name).is_file():
            self._files[name] = SafetensorsFile(self._folder / name)
        return self._files.get(name)

    def _info(self, key: str) -> TensorInfo:
        index = next(iter(self._keys.weights[key]))
        part = self._parts[key, index][0]
        dtype = part.file.infos[part.name].dtype
        return TensorInfo(dtype, self._keys.shape(key, self._layout.tp))

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every Megatron tensor by its key in a distributed checkpoint."""
        return self._infos

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """A rectangle of one, put together from the ranks' files."""
        result = torch.empty(regions.lengths(ranges), dtype=self._infos[name].dtype)
        for index, weight in self._keys.weights[name].items():
            prefix = tuple((i, i + 1) for i in index)
            if regions.intersect(prefix, ranges[: len(index)]) is None:
                continue
            inside = tuple(i - ranges[depth][0] for depth, i in enumerate(index))
            self._fill(result[inside], weight, self._parts[name, index], ranges[len(index) :])
        return result

    def _fill(self, target: Tensor, weight: Weight, parts: list[_Part], ranges: Ranges) -> None:
        """A rectangle of one weight: a box of its axes for every run of each dimension."""
        sizes = weight.sizes(self._layout.tp)
        runs = [list(_runs(s, interval)) for s, interval in zip(sizes, ranges, strict=True)]
        for run in itertools.product(*runs):
            box = tuple(interval for _, boxes in run for interval in boxes)
            cut = tuple(at for at, _ in run)
            place = target[regions.slices(regions.relative(cut, ranges))]
            place = place.view(regions.lengths(box))
            for part in parts:
                common = regions.intersect(box, part.box)
                if common is not None:
                    held = part.read()[regions.slices(regions.relative(common, part.box))]
                    place[regions.slices(regions.relative(common, box))] = held


def _runs(sizes: tuple[int, ...], interval: Interval) -> Iterator[tuple[Interval, Box]]:
    """The boxes of a dimension's axes that an interval falls into, and where each lies."""
    at = interval[0]
    for box in regions.of_range(sizes, interval):
        count = regions.volume(box)
        yield (at, at + count), box
        at += count
