"""Layers that see only the last tokens, as config.json describes them."""

from collections.abc import Sequence
from typing import Any

from megatron_bridge.registry import HfConfig

SLIDING = "sliding_attention"
_KINDS = (SLIDING, "full_attention")


def transformer(window: int | None, kinds: Sequence[str] | None) -> dict[str, Any]:
    """TransformerConfig's arguments for sliding windows.

    Args:
        window: how many tokens such a layer sees, the query's own included; None: all.
        kinds: of each layer, as ``layer_types`` has them; None: all layers have the window.
    """
    if window is None or (kinds is not None and SLIDING not in kinds):
        return {}
    # Megatron counts the tokens before the query's own.
    arguments: dict[str, Any] = {"window_size": (window - 1, 0)}
    if kinds is not None and set(kinds) != {SLIDING}:
        arguments["window_attn_skip_freq"] = [int(kind == SLIDING) for kind in kinds]
    return arguments


def size_problems(window: int | None) -> list[str]:
    """Why no window can be of this size; empty when one can."""
    if window is None or window >= 1:
        return []
    return [f"sliding_window={window} must be at least 1"]


def problems(config: HfConfig, window: int | None, kinds: Sequence[str]) -> list[str]:
    """Why a model with these kinds of layers is not supported; empty when it is."""
    found = size_problems(window)
    layers = config.get("num_hidden_layers")
    if len(kinds) != layers:
        found.append(f"layer_types has {len(kinds)} entries for {layers} layers")
    other = sorted(set(kinds) - set(_KINDS))
    if other:
        found.append(f"layer_types {other} are not supported; supported: {', '.join(_KINDS)}")
    if SLIDING in kinds and window is None:
        found.append(f"layer_types has '{SLIDING}', but the config gives no sliding_window")
    return found


def qwen(config: HfConfig) -> tuple[int | None, list[str]]:
    """Window and kinds of layers of Qwen models: ``max_window_layers`` and after it a window."""
    window = config["sliding_window"] if config["use_sliding_window"] else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config["max_window_layers"] if window is not None else config["num_hidden_layers"]
        kinds = [
            SLIDING if layer >= first else "full_attention"
            for layer in range(config["num_hidden_layers"])
        ]
    return window, list(kinds)
