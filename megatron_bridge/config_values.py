"""Whether the values of a config.json can be what their fields stand for. Imports no torch."""

from collections.abc import Callable, Iterator
from typing import Any

from megatron_bridge.registry import (
    SCORING,
    Architecture,
    HfConfig,
    has_value_head,
    kv_heads,
)

NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _size(value: Any) -> bool:
    return _whole(value) and value > 0


def _scale(value: Any) -> bool:
    return _number(value) and 0 < value < float("inf")


def _list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


_Kind = tuple[str, Callable[[Any], bool]]
_SIZE: _Kind = ("a whole number of at least 1", _size)
# What is gone through one by one: a damaged file must not make that endless.
_MOST = 10_000
_SOME: _Kind = (f"a whole number from 1 to {_MOST:,}", lambda v: _size(v) and v <= _MOST)
_COUNT: _Kind = ("a whole number of at least 0", lambda value: _whole(value) and value >= 0)
_WHOLE: _Kind = ("a whole number", _whole)
_NUMBER: _Kind = ("a number", _number)
_SCALE: _Kind = ("a number above 0", _scale)
_FLAG: _Kind = ("true or false", lambda value: isinstance(value, bool))
_OBJECT: _Kind = ("an object", lambda value: isinstance(value, dict))
_TEXT: _Kind = ("a text", _text)
_SCALES: _Kind = ("a list of numbers above 0", _list_of(_scale))

_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(
        (
            *NEEDED,
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "original_max_position_embeddings",
            "n_shared_experts",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "decoder_sparse_step",
            "sliding_window_pattern",
            "n_group",
            "topk_group",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "num_labels",
        ),
        _SIZE,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts"), _SOME
    ),
    **dict.fromkeys(("first_k_dense_replace", "max_window_layers"), _COUNT),
    **dict.fromkeys(("sliding_window", "num_experts_per_tok", "experts_per_token"), _WHOLE),
    **dict.fromkeys(
        (
            "rms_norm_eps",
            "rope_theta",
            "rope_local_base_freq",
            "partial_rotary_factor",
            "query_pre_attn_scalar",
            "swiglu_limit",
        ),
        _SCALE,
    ),
    **dict.fromkeys(("routed_scaling_factor", "initializer_range"), _NUMBER),
    **dict.fromkeys(
        (
            "tie_word_embeddings",
            "use_sliding_window",
            "norm_topk_prob",
            "qkv_bias",
            "attention_bias",
            "mlp_bias",
        ),
        _FLAG,
    ),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config"), _OBJECT),
    "layer_types": ("a list of texts", _list_of(_text)),
    "mlp_only_layers": ("a list of whole numbers", _list_of(_whole)),
}
_ROTARY_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    **dict.fromkeys(("short_factor", "long_factor"), _SCALES),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _NUMBER),
    "truncate": _FLAG,
    **dict.fromkeys(
        (
            "rope_theta",
            "partial_rotary_factor",
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
        ),
        _SCALE,
    ),
}
# Without one of these the model has no such thing, whatever its default is.
_NULLABLE = {"num_key_value_heads", "sliding_window", "q_lora_rank", "n_group", "topk_group"}


def kinds(config: HfConfig, table: Architecture) -> list[str]:
    """Fields that are absent, or hold what such a field cannot; no other check runs before."""
    absent = [f"config.json lacks '{f}'" for f in NEEDED if config.get(f) is None]
    checked = {*NEEDED, *table.required, *table.defaults, "layer_types", "quantization_config"}
    checked |= {"initializer_range", "num_labels"}
    found = []
    for field in config:
        if field in checked and field in _KINDS:
            found += _of_kind(field, config[field], _KINDS[field], _may_be_null(field, table))
    for field in ("rope_parameters", "rope_scaling"):
        if field in checked and isinstance(config.get(field), dict):
            found += _rotary(field, config[field])
    return absent + found


def _may_be_null(field: str, table: Architecture) -> bool:
    if field in NEEDED:
        return True  # told as absent
    if field in table.required:
        return None in table.required[field] or not all(table.required[field])
    return field in _NULLABLE or table.defaults.get(field) is None


def _of_kind(field: str, value: Any, kind: _Kind, nullable: bool) -> list[str]:
    what, fits = kind
    if (value is None and nullable) or (value is not None and fits(value)):
        return []
    shown = "null" if value is None else repr(value)
    return [f"config.json sets {field}={shown}, which must be {what}"]


def _rotary(field: str, given: dict[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        if isinstance(value, dict):  # of one kind of layer
            yield from _rotary(f"{field}.{name}", value)
        elif name in _ROTARY_KINDS:
            yield from _of_kind(f"{field}.{name}", value, _ROTARY_KINDS[name], nullable=True)


def fit(config: HfConfig, table: Architecture) -> list[str]:
    """Why fields, each possible by itself, cannot go together (``kinds`` found nothing)."""
    made = {**table.defaults, **config}
    return [*_heads(made), *_layer_types(made, table), *_ends(made)]


def _heads(config: HfConfig) -> Iterator[str]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    groups = kv_heads(config)
    if "kv_lora_rank" in config:
        return  # latent attention: heads share nothing and have sizes of their own
    if heads % groups:
        yield f"num_key_value_heads={groups} does not divide num_attention_heads={heads}"
    if config.get("head_dim") is None and hidden % heads:
        yield f"num_attention_heads={heads} does not divide hidden_size={hidden}; set head_dim"


def _layer_types(config: HfConfig, table: Architecture) -> Iterator[str]:
    types, layers = config.get("layer_types"), config["num_hidden_layers"]
    if types is None:
        return
    if len(types) != layers:
        yield f"layer_types has {len(types)} entries for {layers} layers"
    if "layer_types" in table.defaults:
        return
    other = sorted(set(types) - {"full_attention"})
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if other:
        yield f"layer_types {other} are not supported; supported: 'full_attention'"
    elif window is not None:
        yield (
            f"layer_types says that all layers see every token, sliding_window={window} that none "
            f"does; {table.name} has no layers of two kinds: leave out the one that is wrong"
        )


def _ends(config: HfConfig) -> Iterator[str]:
    names = config.get("architectures") or []
    if has_value_head(config) and not all(name.endswith(SCORING) for name in names):
        yield f"architectures={names} asks for a vocabulary and for scores; keep one"
