"""From config.json to the parameters of one rank of a server. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any

from hybridflow.recipe.names import advice
from hybridflow.weight_sync.layout.rules import VOCABULARY_MULTIPLE, Rule, gate_up
from hybridflow.weight_sync.layout.server import (
    DEVICES,
    Server,
    Shapes,
    expert_count,
    expert_width,
    round_up,
)
from hybridflow.weight_sync.layout.tables import TABLES
from megatron_bridge.mappings import huggingface_shapes
from megatron_bridge.registry import HfConfig
from megatron_bridge.reshard import TargetParameter
from megatron_bridge.translation import resolve

_LAYER = "{layer}"


def server_parameters(
    config: Mapping[str, Any], *, tp: int = 1, ep: int = 1, rank: int = 0, device: str = "cpu"
) -> tuple[TargetParameter, ...]:
    """The parameters of rank `rank` of a server, named and shaped as its `named_parameters()`.

    Args:
        config: config.json's content.
        tp: ranks of the server.
        ep: groups of ranks that experts are spread over (SGLang's `--ep-size`); divides `tp`.
        rank: which of the `tp`.
        device: "cpu" (pads intermediate sizes) or "cuda" (may replicate key-value heads).

    Raises:
        ValueError: for an architecture without a table, or sizes that the server cannot cut.
    """
    check(config, tp=tp, ep=ep, device=device)
    assert 0 <= rank < tp, f"rank {rank} of {tp}"
    model = _model(config)
    server = Server(model.config, model.shapes, tp, ep, rank, device)
    return tuple(rule.parameter(server, layer) for rule, layer in model.rules)


def hf_shapes(config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Every HuggingFace tensor of the model and its shape; a tied `lm_head` is not one.

    Raises:
        ValueError: for a config that the bridge does not support.
    """
    return _shapes(_key(config))


def elements(parameters: tuple[TargetParameter, ...]) -> int:
    """Numbers in one rank's parameters, padding included."""
    return sum(prod(parameter.shape) for parameter in parameters)


def check(config: Mapping[str, Any], *, tp: int = 1, ep: int = 1, device: str = "cpu") -> None:
    """ValueError that lists every reason why no such server can hold the model."""
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is none of a server's; {advice(device, DEVICES)}")
    model = _model(config)
    server = Server(model.config, model.shapes, tp, ep, 0, device)
    found = [*_homeless(model), *_unloadable(model, server), *_problems(server)]
    if found:
        raise ValueError(f"no server holds this model with tp={tp}, ep={ep}: {'; '.join(found)}.")


def _problems(server: Server) -> Iterator[str]:
    tp, ep = server.tp, server.ep
    heads, groups = server.heads, server.kv_heads
    if heads % tp:
        yield f"tp must divide the model's {heads} attention heads"
    shared = server.device == "cuda" and tp % groups == 0
    if groups % tp and not shared:
        more = " or be a multiple of them" if server.device == "cuda" else ""
        yield f"tp must divide the model's {groups} KV heads{more}"
    if round_up(server.config["vocab_size"], VOCABULARY_MULTIPLE) % tp:
        yield f"tp must divide the vocabulary padded to {VOCABULARY_MULTIPLE}"
    experts = expert_count(server.config)
    if ep < 1 or tp % ep:
        yield "ep must divide tp"
    elif ep > 1 and not experts:
        yield "ep must be 1 for a model without experts"
    elif experts % ep:
        yield f"ep must divide the model's {experts} experts"
    elif experts and expert_width(server.config) % server.expert_tp:
        yield f"tp / ep must divide an expert's width of {expert_width(server.config)}"


def _unloadable(model: _Model, server: Server) -> Iterator[str]:
    """SGLang cuts a gate and up that a checkpoint stacks before it pads them, and fails."""
    for rule, layer in model.rules:
        if rule.manner is gate_up and len(rule.parts) == 1:
            width = model.shapes[rule.parts[0].format(layer=layer)][0] // 2
            if server.padded(width) != width:
                yield (
                    f"the intermediate size {width}, whose halves the checkpoint stacks, must be a "
                    f"multiple of 32 tp = {32 * server.tp} on the CPU"
                )
            return


def _homeless(model: _Model) -> Iterator[str]:
    if model.homeless:
        yield (
            f"its table has no parameter for {len(model.homeless)} of the model's tensors, among "
            f"them {', '.join(model.homeless[:3])}"
        )


def _table(config: Mapping[str, Any]) -> tuple[Rule, ...]:
    name = (config.get("architectures") or ["none"])[0]
    if name not in TABLES:
        raise ValueError(
            f"the server layout of {name!r} is not known; {advice(name, TABLES)} "
            "Add a table to hybridflow/weight_sync/layout/tables.py."
        )
    return TABLES[name]


@dataclass(frozen=True)
class _Model:
    """A model's tensors and the rules that hold for it, each with its layer.

    `homeless` tensors are in no rule: the server would not load them.
    """

    config: HfConfig
    shapes: Shapes
    rules: tuple[tuple[Rule, int | None], ...]
    homeless: tuple[str, ...]


def _model(config: Mapping[str, Any]) -> _Model:
    return _cached_model(_key(config))


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


@lru_cache(maxsize=16)
def _shapes(key: str) -> Shapes:
    return MappingProxyType(huggingface_shapes(resolve(json.loads(key))))


@lru_cache(maxsize=16)
def _cached_model(key: str) -> _Model:
    raw = json.loads(key)
    table, config, shapes = _table(raw), resolve(raw), _shapes(key)
    rules = tuple(
        (rule, layer)
        for rule, layer in _places(table, config["num_hidden_layers"])
        if rule.holds(shapes, layer)
    )
    experts = range(expert_count(config))
    held = {name for rule, layer in rules for name in rule.sources(layer, experts)}
    return _Model(config, shapes, rules, tuple(name for name in shapes if name not in held))


def _places(table: tuple[Rule, ...], layers: int) -> Iterator[tuple[Rule, int | None]]:
    """Every rule with every layer that it may hold for, in the model's order."""
    per_layer = [place for place, rule in enumerate(table) if _LAYER in rule.target]
    first, last = per_layer[0], per_layer[-1] + 1
    yield from ((rule, None) for rule in table[:first])
    for layer in range(layers):
        yield from ((rule, layer) for rule in table[first:last])
    yield from ((rule, None) for rule in table[last:])
