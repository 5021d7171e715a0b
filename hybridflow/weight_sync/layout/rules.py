"""How a server makes one of its parameters from HuggingFace tensors. Imports no torch.

A rule names the parameter, the tensors and the manner: kept whole, cut along a dimension over
tensor-parallel ranks, stacked, padded. A manner is a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hybridflow.weight_sync.layout.server import Server, Shapes, expert_count, round_up
from megatron_bridge.regions import Box, full
from megatron_bridge.reshard import Fill, TargetParameter

VOCABULARY_MULTIPLE = 64
_EXPERT = "{expert}"


@dataclass(frozen=True)
class Slot:
    """`length` places of dimension `dim` of tensor `source` from `start`, kept at `at`."""

    source: str
    dim: int
    start: int
    length: int
    at: int


Manner = Callable[[Server, Sequence[str]], tuple[tuple[int, ...], tuple[Fill, ...]]]


@dataclass(frozen=True)
class Rule:
    """One parameter of a server, with ``{layer}``; ``{expert}`` stands for each local expert.

    Attributes:
        target: the parameter's name in the server.
        parts: HuggingFace tensors. A rule holds where the first of them exists.
        manner: how the parameter is made of them: (shape, fills).
        dtype: "float32" where the server keeps it so whatever the model's is.
        without: a tensor in whose presence the rule does not hold.
    """

    target: str
    parts: tuple[str, ...]
    manner: Manner
    dtype: str | None = None
    without: str | None = None

    def holds(self, shapes: Shapes, layer: int | None) -> bool:
        """Whether the model of these tensors has the parameter in this layer."""
        if self.without is not None and self.without.format(layer=layer) in shapes:
            return False
        return self.parts[0].format(layer=layer, expert=0) in shapes

    def sources(self, layer: int | None, experts: Iterable[int]) -> Iterator[str]:
        """Every HuggingFace tensor that the parameter may take part of, on any rank."""
        for part in self.parts:
            if _EXPERT not in part:
                yield part.format(layer=layer)
            else:
                yield from (part.format(layer=layer, expert=expert) for expert in experts)

    def parameter(self, server: Server, layer: int | None) -> TargetParameter:
        """The parameter of this layer on this rank."""
        parts = [part.replace("{layer}", str(layer)) for part in self.parts]
        shape, fills = self.manner(server, parts)
        return TargetParameter(self.target.format(layer=layer), shape, fills, self.dtype)


def whole(server: Server, parts: Sequence[str]):
    """Every rank holds the tensor as it is."""
    (name,) = parts
    shape = server.shapes[name]
    return shape, (Fill(name, full(shape), full(shape)),)


def vocabulary(server: Server, parts: Sequence[str]):
    """Rows cut over ranks, after padding to a multiple of 64."""
    (name,) = parts
    size = server.shapes[name][0]
    return _cut(server, name, 0, round_up(size, VOCABULARY_MULTIPLE))


def rows(server: Server, parts: Sequence[str]):
    """Rows cut over ranks; whole heads."""
    (name,) = parts
    return _cut(server, name, 0, server.shapes[name][0])


def columns(server: Server, parts: Sequence[str]):
    """Columns cut over ranks; whole heads."""
    (name,) = parts
    return _cut(server, name, 1, server.shapes[name][1])


def down(server: Server, parts: Sequence[str]):
    """Columns of the padded intermediate size cut over ranks."""
    (name,) = parts
    return _cut(server, name, 1, server.padded(server.shapes[name][1]))


def qkv(server: Server, parts: Sequence[str]):
    """This rank's heads of q, then of k, then of v; of three tensors, or of one that stacks them.

    With fewer key-value heads than ranks (on a GPU) neighbouring ranks hold the same one.
    """
    size, tp, rank = server.head_dim, server.tp, server.rank
    heads, groups = server.heads // tp, max(1, server.kv_heads // tp)
    first = rank * server.kv_heads // tp
    total = (server.heads * size, server.kv_heads * size, server.kv_heads * size)
    starts = (rank * heads * size, first * size, first * size)
    lengths = (heads * size, groups * size, groups * size)
    places = (0, heads * size, (heads + groups) * size)
    slots = [
        Slot(name, 0, origin + start, length, at)
        for (name, origin), start, length, at in zip(
            _origins(parts, total), starts, lengths, places, strict=True
        )
    ]
    return _stack(server, slots, sum(lengths))


def gate_up(server: Server, parts: Sequence[str]):
    """This rank's rows of the gate, then of up, each of the padded intermediate size.

    Of two tensors, or of one that stacks them.
    """
    real = server.shapes[parts[0]][0] * len(parts) // 2
    return _gate_up(server, parts, real, server.padded(real))


def shared_gate_up(server: Server, parts: Sequence[str]):
    """As `gate_up`, of DeepSeek's shared experts: one MLP of several padded widths."""
    real = server.shapes[parts[0]][0]
    return _gate_up(server, parts, real, _shared_width(server))


def shared_down(server: Server, parts: Sequence[str]):
    """As `down`, of DeepSeek's shared experts."""
    (name,) = parts
    return _cut(server, name, 1, _shared_width(server))


def _shared_width(server: Server) -> int:
    config = server.config
    return server.padded(config["moe_intermediate_size"]) * config["n_shared_experts"]


def _gate_up(server: Server, parts: Sequence[str], real: int, padded: int):
    size = padded // server.tp
    start = server.rank * size
    length = _existing(real, start, size)
    origins = _origins(parts, (real, real))
    slots = [
        Slot(name, 0, origin + start, length, half * size)
        for half, (name, origin) in enumerate(origins)
    ]
    return _stack(server, slots, 2 * size)


def _origins(parts: Sequence[str], lengths: Sequence[int]) -> list[tuple[str, int]]:
    """(tensor, first row) of each section: a tensor of its own, or all stacked in one."""
    if len(parts) > 1:
        return [(name, 0) for name in parts]
    return [(parts[0], sum(lengths[:place])) for place in range(len(lengths))]


def stacked(server: Server, parts: Sequence[str]):
    """All rows of every part, one after another, on every rank."""
    slots, at = [], 0
    for name in parts:
        length = server.shapes[name][0]
        slots.append(Slot(name, 0, 0, length, at))
        at += length
    return _stack(server, slots, at)


def experts_gate_up(server: Server, parts: Sequence[str]):
    """[local experts, gate rows then up rows, hidden]; each expert cut, then padded."""
    gate, up = parts
    real, hidden = server.shapes[gate.format(expert=0)]
    size, length = _expert_widths(server, real)
    start = server.expert_rank * length
    fills = []
    experts = _local_experts(server)
    for place, expert in enumerate(experts):
        for name, at in ((gate, 0), (up, size)):
            name = name.format(expert=expert)
            fills.append(_expert(server, Slot(name, 0, start, length, at), place))
    return (len(experts), 2 * size, hidden), tuple(fills)


def experts_down(server: Server, parts: Sequence[str]):
    """[local experts, hidden, columns]; each expert cut, then padded."""
    (down,) = parts
    hidden, real = server.shapes[down.format(expert=0)]
    size, length = _expert_widths(server, real)
    start = server.expert_rank * length
    experts = _local_experts(server)
    fills = tuple(
        _expert(server, Slot(down.format(expert=expert), 1, start, length, 0), place)
        for place, expert in enumerate(experts)
    )
    return (len(experts), hidden, size), fills


def _expert_widths(server: Server, real: int) -> tuple[int, int]:
    """(width of an expert's slice with padding, real places of it)."""
    return server.padded(real) // server.expert_tp, real // server.expert_tp


def _local_experts(server: Server) -> range:
    count = expert_count(server.config) // server.ep
    return range(server.expert_group * count, (server.expert_group + 1) * count)


def _cut(server: Server, name: str, dim: int, padded: int):
    """Dimension `dim`, padded at its end, in as many slices as there are ranks."""
    shape = server.shapes[name]
    size = padded // server.tp
    start = server.rank * size
    slot = Slot(name, dim, start, _existing(shape[dim], start, size), 0)
    return _stack(server, (slot,), size)


def _stack(server: Server, slots: Sequence[Slot], size: int):
    """A parameter of `size` along the slots' dimension; empty slots are padding."""
    shape = list(server.shapes[slots[0].source])
    shape[slots[0].dim] = size
    return tuple(shape), tuple(_fill(server, slot) for slot in slots if slot.length)


def _fill(server: Server, slot: Slot) -> Fill:
    box = full(server.shapes[slot.source])
    source = _along(box, slot.dim, slot.start, slot.length)
    return Fill(slot.source, source, _along(box, slot.dim, slot.at, slot.length))


def _expert(server: Server, slot: Slot, place: int) -> Fill:
    fill = _fill(server, slot)
    return Fill(fill.source, fill.source_box, ((place, place + 1), *fill.target_box))


def _along(box: Box, dim: int, start: int, length: int) -> Box:
    return (*box[:dim], (start, start + length), *box[dim + 1 :])


def _existing(total: int, start: int, length: int) -> int:
    """How many of the `length` places from `start` exist among `total`."""
    return max(0, min(total, start + length) - start)
