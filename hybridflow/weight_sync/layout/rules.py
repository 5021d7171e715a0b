"""How a server makes one of its parameters from HuggingFace tensors. Imports no torch.

A rule names the parameter, the tensors and the manner: kept whole, cut along a dimension over
tensor-parallel ranks, stacked, padded. A manner is a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridflow.weight_sync.layout.server import Server, round_up
from megatron_bridge.regions import Box, full
from megatron_bridge.reshard import Fill, TargetParameter

VOCABULARY_MULTIPLE = 64


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
    """

    target: str
    parts: tuple[str, ...]
    manner: Manner
    dtype: str | None = None

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
    """This rank's heads of q, then of k, then of v.

    With fewer key-value heads than ranks (on a GPU) neighbouring ranks hold the same one.
    """
    q, k, v = parts
    size, tp, rank = server.head_dim, server.tp, server.rank
    heads, groups = server.heads // tp, max(1, server.kv_heads // tp)
    first = rank * server.kv_heads // tp
    return _stack(
        server,
        (
            Slot(q, 0, rank * heads * size, heads * size, 0),
            Slot(k, 0, first * size, groups * size, heads * size),
            Slot(v, 0, first * size, groups * size, (heads + groups) * size),
        ),
        (heads + 2 * groups) * size,
    )


def gate_up(server: Server, parts: Sequence[str]):
    """This rank's rows of the gate, then of up, each of the padded intermediate size."""
    gate, up = parts
    real = server.shapes[gate][0]
    size = server.padded(real) // server.tp
    start = server.rank * size
    length = _existing(real, start, size)
    slots = (Slot(gate, 0, start, length, 0), Slot(up, 0, start, length, size))
    return _stack(server, slots, 2 * size)


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
    count = expert_count(server) // server.ep
    return range(server.expert_group * count, (server.expert_group + 1) * count)


def expert_count(server: Server) -> int:
    """Routed experts of the model; 0 for a dense one."""
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if server.config.get(field):
            return server.config[field]
    return 0


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
