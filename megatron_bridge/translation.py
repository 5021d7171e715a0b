"""From config.json to the arguments of Megatron's classes. Imports no torch."""

from typing import Any

from megatron_bridge.models import dense
from megatron_bridge.registry import Architecture, HfConfig, architecture

_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


def problems(config: HfConfig) -> list[str]:
    """Every reason why the bridge cannot build a model of this config; empty when it can.

    Raises:
        ValueError: when the architecture itself has no table.
    """
    table = architecture(config)
    found = [f"config.json lacks '{field}'" for field in _NEEDED if not config.get(field)]
    found += _values(config, table)
    found += _quantization(config)
    found += table.refusals(config)
    found += [_unknown(field, config[field], table) for field in _unknown_fields(config, table)]
    return found


def _values(config: HfConfig, table: Architecture) -> list[str]:
    """Fields with a value that the table does not allow."""
    found = [
        f"{field}={config[field]!r} is not supported for {table.name}; "
        f"supported: {', '.join(map(repr, allowed))}"
        for field, allowed in table.required.items()
        if config.get(field) is not None and config[field] not in allowed
    ]
    other = set(config.get("layer_types") or ()) - {"full_attention"}
    if other and "layer_types" not in table.defaults:
        found.append(f"layer_types {sorted(other)} are not supported; supported: 'full_attention'")
    return found


# How weights may be stored; they are read as what they stand for.
QUANTIZATIONS = ("fp8", "mxfp4")


def _quantization(config: HfConfig) -> list[str]:
    """A storage of weights that is not read."""
    stored = config.get("quantization_config") or {}
    method = stored.get("quant_method")
    if not stored or method in QUANTIZATIONS:
        return []
    return [
        f"weights quantised with quant_method={method!r} are not read; supported: "
        f"{', '.join(QUANTIZATIONS)}. Use the model's bfloat16 checkpoint"
    ]


def _unknown_fields(config: HfConfig, table: Architecture) -> list[str]:
    """Fields with an effect (a value that is not empty, zero or false) that no table mentions."""
    known = {*_NEEDED, *table.required, *table.defaults, *table.harmless}
    known |= {"layer_types", "quantization_config"}
    return [
        field
        for field, value in config.items()
        if value and field not in known and not field.startswith("_")
    ]


def _unknown(field: str, value: Any, table: Architecture) -> str:
    return (
        f"config.json sets {field}={value!r}, which the bridge does not know; if it changes "
        f"nothing in the model's computation add '{field}' to `harmless` in "
        f"megatron_bridge/models/{table.model_type}.py, otherwise translate it there"
    )


def resolve(config: HfConfig) -> HfConfig:
    """The config with the architecture's defaults in place of absent fields.

    Raises:
        ValueError: listing everything that the bridge does not support.
    """
    found = problems(config)
    if found:
        raise ValueError(
            "this model's config.json is not supported:\n" + "\n".join(f"- {one}" for one in found)
        )
    return {**architecture(config).defaults, **config}


def transformer_arguments(config: HfConfig) -> dict[str, Any]:
    """Arguments of TransformerConfig that the model decides (``config`` resolved)."""
    return architecture(config).transformer(config)


def gpt_arguments(config: HfConfig) -> dict[str, Any]:
    """Arguments of GPTModel that the model decides (``config`` resolved)."""
    gpt = architecture(config).gpt
    return dense.gpt(config) if gpt is None else gpt(config)


def features(config: HfConfig) -> dict[str, Any]:
    """What our layers need beyond TransformerConfig (``config`` resolved)."""
    return architecture(config).features(config)
