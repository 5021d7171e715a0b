"""Where each element of a HuggingFace tensor lies in Megatron's tensors, and back. No torch.

Pure interval arithmetic on the axes that the tables name; moving the bytes is ``views``' and the
live models' part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from megatron_bridge import regions
from megatron_bridge.regions import Box, Interval
from megatron_bridge.registry import (
    PADDED,
    STACK,
    Architecture,
    Axes,
    HfConfig,
    Row,
    architecture,
)


@dataclass(frozen=True)
class PartView:
    """A HuggingFace tensor (or the rows of one that belong to this part), by its axes.

    Attributes:
        name: of the tensor.
        rows: the part's rows of the tensor's first dimension.
        axes: its axes.
        sizes: the sizes of each dimension's axes.
        stack: where the part lies on the Megatron tensor's stack axis.
        expert: the expert whose slice of the tensor this is, where the tensor holds all of them.
    """

    name: str
    rows: Interval
    axes: Axes
    sizes: tuple[tuple[int, ...], ...]
    stack: Interval
    expert: int | None

    @property
    def box(self) -> Box:
        """All of the part that belongs to the weight."""
        return _box(self.axes, self.sizes, self.expert)

    @property
    def flat_sizes(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        return _flat(self.sizes)


# One result serves every layer: a model has tens of thousands of parts.
@cache
def _flat(sizes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(size for dimension in sizes for size in dimension)


@cache
def _box(axes: Axes, sizes: tuple[tuple[int, ...], ...], expert: int | None) -> Box:
    return tuple(
        (expert, expert + 1) if axis == "expert" and expert is not None else (0, size)
        for axis, size in zip(axes.names, _flat(sizes), strict=True)
    )


@dataclass(frozen=True)
class Piece:
    """The same elements in three places: a part, the Megatron tensor, and a box of the latter.

    Attributes:
        part: index of the part.
        huggingface: box of the part.
        megatron: box of the Megatron tensor, of the same elements.
        order: for each Megatron axis the part's axis of the same elements, or None where the part
            has none (its size there is 1).
    """

    part: int
    huggingface: Box
    megatron: Box
    order: tuple[int | None, ...]


@dataclass(frozen=True)
class Weight:
    """One Megatron tensor of a model: a row of the table at a layer and an expert."""

    row: Row
    layer: int | None
    expert: int | None
    shape_of: "_RowShape"

    @property
    def key(self) -> str:
        """Its name in a distributed checkpoint that keeps layers apart."""
        return self.row.checkpoint_key.format(layer=self.layer)

    def live_names(self, local_expert: int | None) -> list[str]:
        """Its possible names in a live model, with the layer's number in the whole model."""
        return [name.format(layer=self.layer, expert=local_expert) for name in self.row.names]

    @cached_property
    def parts(self) -> tuple[PartView, ...]:
        """Its HuggingFace tensors."""
        return tuple(
            PartView(
                part.name.format(layer=self.layer, expert=self.expert),
                rows,
                axes,
                sizes,
                stack,
                self.expert if "expert" in axes.names else None,
            )
            for part, rows, axes, sizes, stack in self.shape_of.parts
        )

    @property
    def axes(self) -> Axes:
        """Axes of the Megatron tensor."""
        return self.shape_of.axes

    def sizes(self, tp: int = 1) -> tuple[tuple[int, ...], ...]:
        """Sizes of each dimension's axes, the vocabulary padded for ``tp`` ranks."""
        return self.shape_of.sizes(tp)

    def shape(self, tp: int = 1) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return self.shape_of.shape(tp)

    def pieces(self, box: Box) -> Iterator[Piece]:
        """What a box of the Megatron tensor is made of; padding is made of nothing."""
        for index, part in enumerate(self.parts):
            piece = self._piece(index, part, box)
            if piece is not None:
                yield piece

    def _piece(self, index: int, part: PartView, box: Box) -> Piece | None:
        names = self.axes.names
        bounds = {
            axis: part.stack if axis == STACK else (0, self.shape_of.real[axis]) for axis in names
        }
        inside = regions.intersect(box, tuple(bounds[axis] for axis in names))
        if inside is None:
            return None
        held = dict(zip(names, inside, strict=True))
        filler = self.shape_of.filler(part.axes)
        huggingface = []
        for axis, whole in zip(part.axes.names, part.box, strict=True):
            if axis == filler:
                start, stop = held[STACK]
                huggingface.append((start - part.stack[0], stop - part.stack[0]))
            else:
                huggingface.append(held.get(axis, whole))
        return Piece(index, tuple(huggingface), inside, self.shape_of.order(part.axes))

    def to_megatron(self, index: int, box: Box) -> Box:
        """Where a box of a part lies in the Megatron tensor: the inverse of ``pieces``."""
        part = self.parts[index]
        held = dict(zip(part.axes.names, box, strict=True))
        filler = self.shape_of.filler(part.axes)
        found = []
        for axis in self.axes.names:
            if axis != STACK:
                found.append(held[axis])
            elif filler is None:
                found.append(part.stack)
            else:
                start, stop = held[filler]
                found.append((start + part.stack[0], stop + part.stack[0]))
        return tuple(found)


class _RowShape:
    """What all layers' and experts' tensors of a row have in common."""

    def __init__(self, row: Row, sizes: dict[str, int]) -> None:
        self.row = row
        self.axes = Axes.parse(row.shape)
        self._size = sizes
        self._fillers: dict[Axes, str | None] = {}
        self._orders: dict[Axes, tuple[int | None, ...]] = {}
        self._padded: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.parts = self._lay_out()
        stacked = self.parts[-1][4][1]
        self.real = {
            axis: stacked if axis == STACK else self._size[axis] for axis in self.axes.names
        }

    def _lay_out(self) -> list[tuple[Any, Interval, Axes, tuple[tuple[int, ...], ...], Interval]]:
        found, stacked, rows = [], 0, {}
        for part in self.row.parts:
            axes = Axes.parse(part.axes)
            sizes = tuple(tuple(self._size[a] for a in dim) for dim in axes.dimensions)
            filler = self.filler(axes)
            length = 1 if filler is None else self._size[filler]
            first = rows.get(part.name, 0)
            rows[part.name] = first + _product(sizes[0])
            found.append((part, (first, rows[part.name]), axes, sizes, (stacked, stacked + length)))
            stacked += length
        return found

    def filler(self, axes: Axes) -> str | None:
        """The part's axis that fills the stack axis; None when it takes one place there."""
        if axes not in self._fillers:
            own = [a for a in axes.names if a not in self.axes.names and a != "expert"]
            assert len(own) <= 1 and (not own or STACK in self.axes.names), (self.row, axes)
            self._fillers[axes] = own[0] if own else None
        return self._fillers[axes]

    def order(self, axes: Axes) -> tuple[int | None, ...]:
        """The part's axis at each Megatron axis."""
        if axes not in self._orders:
            filler = self.filler(axes)
            place = {name: index for index, name in enumerate(axes.names)}
            self._orders[axes] = tuple(
                (place[filler] if filler else None) if axis == STACK else place[axis]
                for axis in self.axes.names
            )
        return self._orders[axes]

    def sizes(self, tp: int) -> tuple[tuple[int, ...], ...]:
        if tp not in self._padded:
            self._padded[tp] = tuple(
                tuple(
                    padded_vocabulary(self.real[axis], tp) if axis == PADDED else self.real[axis]
                    for axis in dimension
                )
                for dimension in self.axes.dimensions
            )
        return self._padded[tp]

    def shape(self, tp: int) -> tuple[int, ...]:
        return tuple(_product(dimension) for dimension in self.sizes(tp))


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def padded_vocabulary(size: int, tp: int) -> int:
    """The vocabulary's size padded only as far as ``tp`` needs it."""
    return -(-size // tp) * tp


def weights(config: HfConfig) -> list[Weight]:
    """Every Megatron tensor of a model of this config (resolved), in the model's order."""
    table = architecture(config)
    sizes = table.sizes(config)
    rows = table.rows_of(config)
    shapes = {id(row): _RowShape(row, sizes) for row in rows}
    per_layer = [i for i, row in enumerate(rows) if row.per_layer]
    first, last = per_layer[0], per_layer[-1] + 1
    found = [Weight(row, None, None, shapes[id(row)]) for row in rows[:first]]
    for layer in range(config["num_hidden_layers"]):
        found += _layer(rows[first:last], shapes, table, config, layer, sizes.get("expert", 0))
    return found + [Weight(row, None, None, shapes[id(row)]) for row in rows[last:]]


def _layer(
    rows: list[Row],
    shapes: dict[int, _RowShape],
    table: Architecture,
    config: HfConfig,
    layer: int,
    experts: int,
) -> Iterator[Weight]:
    kind = "moe" if table.is_moe(config, layer) else "dense"
    own = [row for row in rows if row.layers in (None, kind)]
    for row in own:
        if not row.per_expert:
            yield Weight(row, layer, None, shapes[id(row)])
    for expert in range(experts):
        for row in own:
            if row.per_expert:
                yield Weight(row, layer, expert, shapes[id(row)])


def huggingface_shapes(config: HfConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a HuggingFace checkpoint, with its shape."""
    rows: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in weights(config):
        for part in weight.parts:
            rows[part.name] = max(rows.get(part.name, 0), part.rows[1])
            tail = tuple(_product(dimension) for dimension in part.sizes[1:])
            shapes[part.name] = (rows[part.name], *tail)
    return shapes
