"""Mistral, dense: Llama whose layers may all see only the last tokens."""

from typing import Any

from megatron_bridge.models import dense, windows
from megatron_bridge.registry import Architecture, HfConfig

_DEFAULTS = dense.DEFAULTS | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def _transformer(config: HfConfig) -> dict[str, Any]:
    return dense.transformer(config) | windows.transformer(config["sliding_window"], None)


def _refusals(config: HfConfig) -> list[str]:
    config = {**_DEFAULTS, **config}
    return dense.refusals(_DEFAULTS)(config) + windows.size_problems(config["sliding_window"])


ARCHITECTURES = (
    Architecture(
        name="MistralForCausalLM",
        model_type="mistral",
        rows=dense.LLAMA,
        transformer=_transformer,
        required=dense.REQUIRED,
        defaults=_DEFAULTS,
        harmless=dense.HARMLESS,
        ignored=dense.IGNORED,
        features=dense.features,
        refusals=_refusals,
        models="Mistral 7B, Nemo, Small",
    ),
)
