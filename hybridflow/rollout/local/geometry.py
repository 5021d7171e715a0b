"""What the local engine's forward pass takes from a model's folder, and which models it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.recipe.names import advice
from hybridflow.recipe.served import LOCAL
from megatron_bridge.registry import architecture, head_dim, kv_heads, tied
from megatron_bridge.translation import resolve

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen: how many, and whether their weights sum to one."""

    experts_per_token: int
    normalized: bool


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder: numbers of heads and layers, the size of a head, the vocabulary."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int
    tied: bool
    routing: Routing | None


def geometry(config: Mapping[str, Any]) -> Geometry:
    """Read config.json's content; ValueError for a model that is not run."""
    name = (config.get("architectures") or ["none"])[0]
    if name not in LOCAL:
        raise ValueError(
            f"the local engine does not run {name!r}; {advice(name, LOCAL)} Or use engine: sglang."
        )
    config = resolve(dict(config))
    return Geometry(
        heads=config["num_attention_heads"],
        kv_heads=kv_heads(config),
        head_dim=head_dim(config),
        vocab=config["vocab_size"],
        layers=config["num_hidden_layers"],
        tied=tied(config),
        routing=_routing(config),
    )


def _routing(config: Mapping[str, Any]) -> Routing | None:
    if "expert" not in architecture(dict(config)).sizes(dict(config)):
        return None
    return Routing(config["num_experts_per_tok"], config.get("norm_topk_prob", True))


def eos_ids(folder: str | Path) -> frozenset[int]:
    """Ids that end a response: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def check_supported(hf_config: Any) -> None:
    """ValueError for a transformers config of a known architecture that is not run."""
    rope = hf_config.rope_parameters
    faults = []
    if rope["rope_type"] not in _ROPE_TYPES:
        faults.append(f"rope type {rope['rope_type']!r} (known: {', '.join(_ROPE_TYPES)})")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        faults.append("partial_rotary_factor")
    if getattr(hf_config, "sliding_window", None):
        faults.append(f"sliding_window {hf_config.sliding_window}")
    if hf_config.hidden_act != "silu":
        faults.append(f"hidden_act {hf_config.hidden_act!r} (known: silu)")
    if faults:
        raise ValueError(
            "the local engine does not run " + ", ".join(faults) + ". Use engine: sglang."
        )
