"""The sizes that the local engine's forward pass takes from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_bridge.registry import head_dim, kv_heads, tied
from megatron_bridge.translation import resolve


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder: numbers of heads and layers, the size of a head, the vocabulary."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int
    tied: bool


def geometry(config: Mapping[str, Any]) -> Geometry:
    """Read config.json's content; ValueError for what the bridge does not support."""
    config = resolve(dict(config))
    return Geometry(
        heads=config["num_attention_heads"],
        kv_heads=kv_heads(config),
        head_dim=head_dim(config),
        vocab=config["vocab_size"],
        layers=config["num_hidden_layers"],
        tied=tied(config),
    )
