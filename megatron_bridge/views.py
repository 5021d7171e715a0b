"""A HuggingFace checkpoint seen as Megatron's tensors, and a Megatron checkpoint as HuggingFace's.

Both are sources like any other: what reads them need not know which kind lies beneath.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_bridge import regions, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight, huggingface_shapes, weights
from megatron_bridge.reading import in_huggingface_order, read_box, read_megatron
from megatron_bridge.regions import Box
from megatron_bridge.registry import HfConfig, architecture
from megatron_bridge.sharding import Placement, holdings
from megatron_bridge.source import Ranges, Source, TensorInfo


class _Keys:
    """The tensors of a Megatron checkpoint: which weights each holds, and where."""

    def __init__(self, config: HfConfig, *, stacked: bool) -> None:
        self.stacked = stacked
        self.layers = config["num_hidden_layers"]
        self.experts = architecture(config).sizes(config).get("expert", 0)
        self.weights: dict[str, dict[tuple[int, ...], Weight]] = {}
        for weight in weights(config):
            self.weights.setdefault(self.key(weight), {})[self.prefix(weight)] = weight

    def key(self, weight: Weight) -> str:
        if weight.layer is not None and self.stacked:
            return weight.row.checkpoint_key.replace("layers.{layer}.", "layers.")
        return weight.key

    def prefix(self, weight: Weight) -> tuple[int, ...]:
        """The weight's index on the key's leading dimensions: layer, expert."""
        layer = (weight.layer,) if weight.layer is not None and self.stacked else ()
        expert = (weight.expert,) if weight.row.per_expert else ()
        return (*layer, *expert)  # type: ignore[arg-type]

    def shape(self, key: str, tp: int) -> tuple[int, ...]:
        weight = next(iter(self.weights[key].values()))
        layer = (self.layers,) if weight.layer is not None and self.stacked else ()
        expert = (self.experts,) if weight.row.per_expert else ()
        return (*layer, *expert, *weight.shape(tp))


def keys_of(config: HfConfig) -> _Keys:
    """The keys that Megatron saves for a model of this config (resolved)."""
    return _Keys(config, stacked=architecture(config).stacks_layers(config))


class HuggingFaceAsMegatron:
    """HuggingFace tensors as the tensors of a Megatron distributed checkpoint.

    Args:
        source: of HuggingFace tensors.
        hf_config: config.json of the model.
        layout: the vocabulary is padded for its ``tp``.

    Raises:
        ValueError: when the config is not supported, or tensors that one Megatron tensor holds
            differ in dtype.
    """

    def __init__(
        self, source: Source, hf_config: HfConfig, layout: ParallelLayout | None = None
    ) -> None:
        self._source = source
        self._layout = layout or ParallelLayout()
        self._keys = keys_of(translation.resolve(hf_config))
        self._infos = {key: self._info(key) for key in self._keys.weights}

    def _info(self, key: str) -> TensorInfo:
        held = self._source.tensors()
        names = {part.name for w in self._keys.weights[key].values() for part in w.parts}
        dtypes = {held[name].dtype for name in names}
        if len(dtypes) > 1:
            raise ValueError(
                f"the tensors that Megatron keeps as '{key}' differ in dtype "
                f"({', '.join(sorted(map(str, dtypes)))}), such as '{min(names)}'; give a dtype to "
                "convert to"
            )
        return TensorInfo(dtypes.pop(), self._keys.shape(key, self._layout.tp))

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every Megatron tensor, by its key."""
        return self._infos

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """A rectangle of one; padding is zero."""
        held = self._keys.weights[name]
        depth = len(next(iter(held)))
        shape = regions.lengths(ranges)
        # Every layer and expert is there; looking through all for each would take their square.
        wanted = list(itertools.product(*(range(*interval) for interval in ranges[:depth])))
        if len(wanted) == 1:
            return self._rectangle(held[wanted[0]], ranges[depth:]).reshape(shape)
        result = torch.empty(shape, dtype=self._infos[name].dtype)
        for index in wanted:
            at = tuple(i - start for i, (start, _) in zip(index, ranges, strict=False))
            result[at] = self._rectangle(held[index], ranges[depth:])
        return result

    def _rectangle(self, weight: Weight, ranges: Ranges) -> Tensor:
        sizes = weight.sizes(self._layout.tp)
        runs = list(regions.of_range(sizes[0], ranges[0]))
        tails = _tail_boxes(sizes[1:], ranges[1:])
        if len(runs) == 1:
            found = read_megatron(self._source, weight, runs[0] + tails)
            return found.reshape(regions.lengths(ranges))
        first = self._source.tensors()[weight.parts[0].name]
        result = torch.empty(regions.lengths(ranges), dtype=first.dtype)
        at = 0
        for run in runs:
            rows = regions.volume(run)
            part = result[at : at + rows]
            box = run + tails
            part.view(regions.lengths(box)).copy_(read_megatron(self._source, weight, box))
            at += rows
        return result


def _tail_boxes(sizes: tuple[tuple[int, ...], ...], ranges: Ranges) -> Box:
    """Boxes of the dimensions after the first, which are cut at whole slices of their axes."""
    found: Box = ()
    for dimension, interval in zip(sizes, ranges, strict=True):
        boxes = list(regions.of_range(dimension, interval))
        if len(boxes) != 1:
            raise ValueError(f"columns {interval} cut within the axes {dimension}; read them apart")
        found += boxes[0]
    return found


class MegatronAsHuggingFace:
    """The tensors of a Megatron distributed checkpoint as HuggingFace's.

    Args:
        source: of Megatron tensors by key, with layers stacked or apart.
        hf_config: config.json of the model.

    Raises:
        ValueError: listing every key that is missing or of another shape.
    """

    def __init__(self, source: Source, hf_config: HfConfig) -> None:
        config = translation.resolve(hf_config)
        self._source = source
        self._keys = keys_of(config)
        if not any(key in source.tensors() for key in self._keys.weights if "layers." in key):
            self._keys = _Keys(config, stacked=False)
        self._check()
        self._homes: dict[str, list[tuple[Weight, int]]] = {}
        for held in self._keys.weights.values():
            for weight in held.values():
                for index, part in enumerate(weight.parts):
                    self._homes.setdefault(part.name, []).append((weight, index))
        self._infos = {
            name: TensorInfo(self._dtype(name), shape)
            for name, shape in huggingface_shapes(config).items()
        }

    def _check(self) -> None:
        present = self._source.tensors()
        found = []
        for key, held in self._keys.weights.items():
            if key not in present:
                found.append(f"'{key}' is missing")
                continue
            shape = self._keys.shape(key, 1)
            padded = next(iter(held.values())).axes.names[0] == "vocab"
            if not _fits(present[key].shape, shape, padded):
                found.append(f"'{key}' has shape {present[key].shape}, config.json asks {shape}")
        if found:
            raise ValueError(
                "this Megatron checkpoint does not fit the model's config.json:\n"
                + "\n".join(f"- {one}" for one in found)
            )

    def _dtype(self, name: str) -> torch.dtype:
        weight, _ = self._homes[name][0]
        return self._source.tensors()[self._keys.key(weight)].dtype

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every HuggingFace tensor, in the model's order."""
        return self._infos

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """A rectangle of one; a view where one Megatron chunk holds it in order."""
        pieces = list(self._pieces(name, ranges))
        shape = regions.lengths(ranges)
        if len(pieces) == 1:
            return self._read(*pieces[0][:3]).reshape(shape)
        result = torch.empty(shape, dtype=self._infos[name].dtype)
        for weight, index, box, rows in pieces:
            part = result[rows[0] : rows[1]]
            part.view(regions.lengths(box)).copy_(self._read(weight, index, box))
        return result

    def _pieces(
        self, name: str, ranges: Ranges
    ) -> Iterator[tuple[Weight, int, Box, tuple[int, int]]]:
        """Boxes of parts that make up the rectangle, with their rows of it."""
        for weight, index in self._homes[name]:
            part = weight.parts[index]
            rows = regions.overlap(part.rows, ranges[0])
            if rows is None:
                continue
            tails = _tail_boxes(part.sizes[1:], ranges[1:])
            at = (rows[0] - part.rows[0], rows[1] - part.rows[0])
            start = rows[0] - ranges[0][0]
            for run in regions.of_range(part.sizes[0], at):
                count = regions.volume(run)
                whole = run + tails
                held = regions.intersect(whole, part.box)
                if held == whole:
                    yield weight, index, whole, (start, start + count)
                elif held is not None:  # this expert's slice of a tensor of all experts
                    inner = regions.flat(part.sizes[0], held[: len(run)])
                    assert inner is not None
                    first = inner[0] + part.rows[0] - ranges[0][0]
                    yield weight, index, held, (first, first + inner[1] - inner[0])
                start += count

    def _read(self, weight: Weight, index: int, box: Box) -> Tensor:
        """A box of a part, one dimension per axis of the part."""
        megatron = weight.to_megatron(index, box)
        piece = next(p for p in weight.pieces(megatron) if p.part == index)
        prefix = tuple((i, i + 1) for i in self._keys.prefix(weight))
        found = read_box(
            self._source, self._keys.key(weight), weight.sizes(), megatron, prefix=prefix
        )
        return in_huggingface_order(found, piece)


def _fits(held: tuple[int, ...], wanted: tuple[int, ...], padded: bool) -> bool:
    if padded and len(held) == len(wanted):
        return held[0] >= wanted[0] and held[1:] == wanted[1:]
    return held == wanted


def chunks(hf_config: HfConfig, layout: ParallelLayout) -> Iterator[tuple[str, Ranges]]:
    """The rectangles of a checkpoint's tensors that the ranks of a layout hold, each once.

    Raises:
        ValueError: when the model cannot be cut so.
    """
    found = layout.problems(hf_config)
    if found:
        raise ValueError("the model cannot be cut so:\n" + "\n".join(f"- {one}" for one in found))
    config = translation.resolve(hf_config)
    keys = keys_of(config)
    placement = Placement(layout, keys.layers, keys.experts)
    for key, held in keys.weights.items():
        for index, weight in held.items():
            prefix = tuple((i, i + 1) for i in index)
            parts = placement.tensor_parallel(weight)
            for owner in placement.owners(weight):
                for holding in holdings(weight, parts, owner.place):
                    for box in _rectangles(weight.sizes(layout.tp), holding.box):
                        yield key, prefix + box


def _rectangles(sizes: tuple[tuple[int, ...], ...], box: Box) -> Iterator[Ranges]:
    """The box as rectangles of the tensor's own dimensions."""
    if not sizes:
        yield ()
        return
    depth = len(sizes[0])
    for interval in _runs(sizes[0], box[:depth]):
        for rest in _rectangles(sizes[1:], box[depth:]):
            yield (interval, *rest)


def _runs(sizes: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """The flat intervals of a dimension that a box of its axes is."""
    interval = regions.flat(sizes, box)
    if interval is not None:
        yield interval
        return
    inner = math.prod(sizes[1:])
    for index in range(*box[0]):
        for start, stop in _runs(sizes[1:], box[1:]):
            yield index * inner + start, index * inner + stop
