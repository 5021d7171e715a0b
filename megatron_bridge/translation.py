"""From config.json to the arguments of Megatron's classes. Imports no torch."""

from typing import Any

from megatron_bridge import config_values
from megatron_bridge.models import dense
from megatron_bridge.registry import Architecture, HfConfig, architecture, module_of


def problems(config: HfConfig) -> list[str]:
    """Every reason why the bridge cannot build a model of this config; empty when it can.

    Raises:
        ValueError: when the architecture itself has no table.
    """
    table = architecture(config)
    found = config_values.kinds(config, table)
    if not found:
        found += config_values.fit(config, table)
        found += _quantization(config)
        found += table.refusals(config)
    found += _values(config, table)
    found += [_unknown(field, config[field], table) for field in _unknown_fields(config, table)]
    return found


def _values(config: HfConfig, table: Architecture) -> list[str]:
    """Fields with a value that the table does not allow."""
    return [
        f"{field}={'null' if config[field] is None else repr(config[field])} is not supported for "
        f"{table.name}; supported: {', '.join(map(repr, allowed))}"
        for field, allowed in table.required.items()
        if field in config and not _allowed(config[field], allowed)
    ]


def _allowed(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Null is what transformers takes for false; it stands for no default of another kind."""
    return value in allowed or (value is None and not all(allowed))


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
    known = {*config_values.NEEDED, *table.required, *table.defaults, *table.harmless}
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
        f"megatron_bridge/models/{module_of(table)}.py, otherwise translate it there"
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


def with_value_head(hf_config: HfConfig, scores: int = 1, bias: bool = False) -> HfConfig:
    """The config of a reward model or critic on a base model: ``scores`` numbers per token, with
    a bias where told."""
    table = architecture(hf_config)
    fields = {
        "architectures": [table.token_classifier_name if bias else table.classifier_name],
        "num_labels": scores,
        "tie_word_embeddings": False,
    }
    without = {k: v for k, v in hf_config.items() if k not in ("id2label", "label2id")}
    return {**without, **fields}
