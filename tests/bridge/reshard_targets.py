"""Rollout layouts for tests: plain, fused and padded as servers have them, and random ones."""

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_bridge.regions import Box, Interval
from megatron_bridge.reshard import Fill, TargetParameter

Shapes = Mapping[str, tuple[int, ...]]
Engine = list[tuple[TargetParameter, ...]]

_ROWS = {
    *("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    *("q_b_proj", "kv_b_proj", "w1", "w3"),
}
_COLUMNS = {"o_proj", "down_proj", "w2"}


def cut(size: int, parts: int, part: int) -> Interval:
    """Part of a dimension, as evenly as it goes."""
    return size * part // parts, size * (part + 1) // parts


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def _lengths(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _sliced(shape: tuple[int, ...], dimension: int, interval: Interval) -> Box:
    return (*_whole(shape[:dimension]), interval, *_whole(shape[dimension + 1 :]))


def _expert(name: str) -> int | None:
    number = name.partition(".experts.")[2].split(".")[0]
    return int(number) if number.isdigit() else None


def plain(shapes: Shapes, tp: int, ep: int = 1) -> Engine:
    """Each tensor cut over ``tp`` ranks; experts spread over ``ep`` groups of these ranks."""
    engine: list[list[TargetParameter]] = [[] for _ in range(tp)]
    experts = 1 + max((_expert(name) or 0 for name in shapes), default=0)
    for name, shape in shapes.items():
        expert, first, parts = _expert(name), 0, tp
        if expert is not None:
            parts = tp // ep
            first = expert // (experts // ep) * parts
        dimension = _cut_dimension(name)
        for part in range(parts):
            box = _whole(shape)
            if dimension is not None:
                box = _sliced(shape, dimension, cut(shape[dimension], parts, part))
            lengths = _lengths(box)
            fills = (Fill(name, box, _whole(lengths)),)
            engine[first + part].append(TargetParameter(name, lengths, fills))
    return [tuple(rank) for rank in engine]


def _cut_dimension(name: str) -> int | None:
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if kind != "weight" or module not in _ROWS | _COLUMNS:
        return None
    return 0 if module in _ROWS else 1


def scattered(shapes: Shapes, ranks: int, seed: int) -> Engine:
    """Every tensor cut at random places into boxes that random ranks keep."""
    chance = random.Random(seed)
    engine: list[list[TargetParameter]] = [[] for _ in range(ranks)]
    for name, shape in shapes.items():
        marks = [sorted({0, n, *(chance.randint(0, n) for _ in range(2))}) for n in shape]
        for box in itertools.product(*(itertools.pairwise(edges) for edges in marks)):
            lengths = _lengths(box)
            keeper = engine[chance.randrange(ranks)]
            # Behind a row of padding, in a stack where chance says so.
            lead = (1,) * chance.randint(0, 1)
            target = (*_whole(lead), (1, 1 + lengths[0]), *_whole(lengths[1:]))
            outer = (*lead, 1 + lengths[0], *lengths[1:])
            keeper.append(TargetParameter(f"{name}@{box}", outer, (Fill(name, box, target),)))
    return [tuple(keeper) for keeper in engine]


def server(config: Mapping[str, Any], shapes: Shapes, tp: int, pad: int = 8) -> Engine:
    """A Qwen3 (or Qwen3-MoE) as servers keep it: fused, padded, key-value heads shared."""
    return [tuple(_Server(config, shapes, tp, rank, pad).parameters()) for rank in range(tp)]


class _Server:
    def __init__(
        self, config: Mapping[str, Any], shapes: Shapes, tp: int, rank: int, pad: int
    ) -> None:
        self._shapes, self._tp, self._rank, self._pad = shapes, tp, rank, pad
        self._kv_heads, self._layers = config["num_key_value_heads"], config["num_hidden_layers"]
        self._experts = config.get("num_experts", 0)

    def parameters(self) -> Iterator[TargetParameter]:
        yield self._vocabulary("model.embed_tokens.weight")
        for layer in range(self._layers):
            yield from self._layer(f"model.layers.{layer}.")
        yield self._rows("model.norm.weight", {})
        if "lm_head.weight" in self._shapes:
            yield self._vocabulary("lm_head.weight")

    def _layer(self, layer: str) -> Iterator[TargetParameter]:
        attention = f"{layer}self_attn."
        kv = (min(self._kv_heads, self._tp), self._rank * min(self._kv_heads, self._tp) // self._tp)
        mine = (self._tp, self._rank)
        shares = {"q_proj": mine, "k_proj": kv, "v_proj": kv}
        names = {f"{attention}{name}.weight": share for name, share in shares.items()}
        yield self._rows(f"{attention}qkv_proj.weight", names)
        yield self._columns(f"{attention}o_proj.weight")
        for norm in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm"):
            yield self._rows(f"{layer}{norm}.weight", {})
        yield self._rows(f"{layer}post_attention_layernorm.weight", {})
        gate_up = {f"{layer}mlp.{name}.weight": mine for name in ("gate_proj", "up_proj")}
        if f"{layer}mlp.gate_proj.weight" in self._shapes:
            yield self._rows(f"{layer}mlp.gate_up_proj.weight", gate_up)
            yield self._columns(f"{layer}mlp.down_proj.weight")
            return
        yield self._rows(f"{layer}mlp.gate.weight", {})
        yield from self._stacks(f"{layer}mlp.experts.")

    def _rows(self, name: str, sources: dict[str, tuple[int, int]]) -> TargetParameter:
        """Shares of tensors' rows behind one another; a tensor of that name where none is given."""
        at, fills = 0, []
        for source, share in (sources or {name: (1, 0)}).items():
            shape = self._shapes[source]
            interval = cut(shape[0], *share)
            rows = interval[1] - interval[0]
            target = ((at, at + rows), *_whole(shape[1:]))
            fills.append(Fill(source, _sliced(shape, 0, interval), target))
            at += rows
        return TargetParameter(name, (at, *shape[1:]), tuple(fills))

    def _columns(self, name: str) -> TargetParameter:
        shape = self._shapes[name]
        box = _sliced(shape, 1, cut(shape[1], self._tp, self._rank))
        return TargetParameter(name, _lengths(box), (Fill(name, box, _whole(_lengths(box))),))

    def _vocabulary(self, name: str) -> TargetParameter:
        size, hidden = self._shapes[name]
        rows = -(-size // (self._pad * self._tp)) * self._pad
        start, stop = (min(size, rows * place) for place in (self._rank, self._rank + 1))
        box, target = ((start, stop), (0, hidden)), ((0, stop - start), (0, hidden))
        fills = (Fill(name, box, target),) if start < stop else ()
        return TargetParameter(name, (rows, hidden), fills)

    def _stacks(self, module: str) -> Iterator[TargetParameter]:
        gate_up, down = [], []
        for expert in range(self._experts):
            at = 0
            for name in ("gate_proj", "up_proj"):
                source = f"{module}{expert}.{name}.weight"
                shape = self._shapes[source]
                box = _sliced(shape, 0, cut(shape[0], self._tp, self._rank))
                rows = _lengths(box)[0]
                inside = ((expert, expert + 1), (at, at + rows), (0, shape[1]))
                gate_up.append(Fill(source, box, inside))
                at += rows
            source = f"{module}{expert}.down_proj.weight"
            box = _sliced(self._shapes[source], 1, cut(shape[0], self._tp, self._rank))
            down.append(Fill(source, box, ((expert, expert + 1), *_whole(_lengths(box)))))
        yield TargetParameter(f"{module}w13", (self._experts, at, shape[1]), tuple(gate_up))
        width = _lengths(down[0].source_box)
        yield TargetParameter(f"{module}w2", (self._experts, *width), tuple(down))
