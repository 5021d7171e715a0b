"""Where each element of a HuggingFace tensor lies in Megatron's tensors, and back. No torch.

Pure interval arithmetic on the axes that the tables name; moving the bytes is ``views``' and the
live models' part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_bridge.regions import Box, Interval
from megatron_bridge.registry import Architecture, Axes, HfConfig, Row, architecture
from megatron_bridge.row_shape import Piece, RowShape, box_of, flat


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
        return box_of(self.axes, self.sizes, self.expert)

    @property
    def flat_sizes(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        return flat(self.sizes)


@dataclass(frozen=True)
class Weight:
    """One Megatron tensor of a model: a row of the table at a layer and an expert."""

    row: Row
    layer: int | None
    expert: int | None
    shape_of: RowShape

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
                self.name_of(part.name),
                part.rows,
                part.axes,
                part.sizes,
                part.stack,
                self.expert if "expert" in part.axes.names else None,
            )
            for part in self.shape_of.parts
        )

    def name_of(self, template: str) -> str:
        """The name of a HuggingFace tensor that the row has with ``{layer}`` and ``{expert}``."""
        return template.format(layer=self.layer, expert=self.expert)

    @property
    def slice_of(self) -> int | None:
        """The expert whose slice of a HuggingFace tensor it has, where that holds all experts.

        Weights of one row with the same slice have the same pieces.
        """
        return self.expert if self.shape_of.holds_experts else None

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
        return self.shape_of.pieces(self.slice_of, box)

    def to_megatron(self, index: int, box: Box) -> Box:
        """Where a box of a part lies in the Megatron tensor: the inverse of ``pieces``."""
        return self.shape_of.to_megatron(index, box)


def weights(config: HfConfig) -> list[Weight]:
    """Every Megatron tensor of a model of this config (resolved), in the model's order."""
    table = architecture(config)
    sizes = table.sizes(config)
    rows = table.rows_of(config)
    shapes = {id(row): RowShape(row, sizes) for row in rows}
    per_layer = [i for i, row in enumerate(rows) if row.per_layer]
    first, last = per_layer[0], per_layer[-1] + 1
    found = [Weight(row, None, None, shapes[id(row)]) for row in rows[:first]]
    for layer in range(config["num_hidden_layers"]):
        found += _layer(rows[first:last], shapes, table, config, layer, sizes.get("expert", 0))
    return found + [Weight(row, None, None, shapes[id(row)]) for row in rows[last:]]


def _layer(
    rows: list[Row],
    shapes: dict[int, RowShape],
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
    each = [row for row in own if row.per_expert]
    for expert in range(experts):
        for row in each:
            yield Weight(row, layer, expert, shapes[id(row)])


def huggingface_shapes(config: HfConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a HuggingFace checkpoint, with its shape."""
    return shapes_of(weights(config))


def shapes_of(model: list[Weight]) -> dict[str, tuple[int, ...]]:
    """Every HuggingFace tensor of these weights, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in model:
        for template, shape in weight.shape_of.tensors:
            name = template.format(layer=weight.layer, expert=weight.expert)
            held = shapes.get(name)
            # Rows of the table may share a tensor: it reaches as far as the longest says.
            if held is None or held < shape:
                shapes[name] = shape
    return shapes
