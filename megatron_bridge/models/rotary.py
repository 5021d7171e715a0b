"""Rotary embeddings as config.json describes them, in either of its forms."""

from difflib import get_close_matches
from typing import Any

from megatron_bridge.registry import HfConfig

Parameters = dict[str, Any]

_EVERY = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_TRAINED = "original_max_position_embeddings"
# What each kind needs and what it may have besides.
_NEEDED: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", _TRAINED}),
    "yarn": frozenset({"factor", _TRAINED}),
    "longrope": frozenset({"factor", "short_factor", "long_factor", _TRAINED}),
}
_OPTIONAL: dict[str, frozenset[str]] = {
    "yarn": frozenset(
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    ),
    "longrope": frozenset({"attention_factor"}),
}
# Fields of config.json that say something of rotary embeddings, with their meaning when absent.
DEFAULTS: dict[str, Any] = {
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": None,
    "partial_rotary_factor": None,
    _TRAINED: None,
}


def parameters(config: HfConfig, *, theta: float = 10000.0, partial: float = 1.0) -> Parameters:
    """``rope_parameters`` in transformers 5's form, complete.

    Args:
        config: config.json, in that form or with ``rope_scaling`` and ``rope_theta``.
        theta: the base where the config has none.
        partial: the rotated share of a head where the config says none.
    """
    raw = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return complete(
        {
            "rope_theta": _first(config.get("rope_theta"), theta),
            "partial_rotary_factor": _first(config.get("partial_rotary_factor"), partial),
            **{key: value for key, value in raw.items() if value is not None},
        },
        config,
    )


def complete(given: Parameters, config: HfConfig) -> Parameters:
    """The parameters with what the rest of the config says for absent ones."""
    made = dict(given)
    old = made.pop("type", None)
    made["rope_type"] = made.get("rope_type") or old or "default"
    if _TRAINED not in _NEEDED.get(made["rope_type"], ()):
        return made
    longest, trained = config.get("max_position_embeddings"), config.get(_TRAINED)
    if trained is not None:
        made[_TRAINED] = trained
    elif longest is not None:
        made.setdefault(_TRAINED, longest)
    if made["rope_type"] in ("yarn", "longrope") and longest is not None:
        made.setdefault("factor", longest / made[_TRAINED])
    return made


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def problems(made: Parameters, width: int, *, partial: bool = False) -> list[str]:
    """Why these rotary embeddings are not supported; empty when they are.

    Args:
        made: from ``parameters``.
        width: of a head, or of what is rotated of it.
        partial: whether the architecture rotates a part of each head when told so.
    """
    kind = made["rope_type"]
    if kind == "dynamic":
        return [
            "rope_type 'dynamic' is not supported: its angles depend on the longest sequence of a "
            "batch, so those of a token would change with the sequences beside it; use 'yarn' or "
            "'linear'"
        ]
    if kind not in _NEEDED:
        return [f"rope_type '{kind}' is not supported; supported: {', '.join(sorted(_NEEDED))}"]
    found = [f"rope_type '{kind}' needs {key}" for key in sorted(_NEEDED[kind] - made.keys())]
    known = _EVERY | _NEEDED[kind] | _OPTIONAL.get(kind, frozenset())
    found += [_unknown(kind, key, made[key], known) for key in sorted(made.keys() - known)]
    if not partial and made.get("partial_rotary_factor", 1.0) != 1.0:
        found.append(
            f"partial_rotary_factor={made['partial_rotary_factor']} is not supported: "
            "transformers' own class of this architecture rotates whole heads"
        )
    return found + _width_problems(made, width)


def _width_problems(made: Parameters, width: int) -> list[str]:
    """Why heads of this width cannot be rotated so."""
    rotated = int(width * made.get("partial_rotary_factor", 1.0))
    if rotated < 2 or rotated % 2:
        return [
            f"{rotated} components of {width} would be rotated, and pairs are; they must be even"
        ]
    pairs = rotated // 2
    return [
        f"{name} has {len(made[name])} entries for the {pairs} pairs of components that are rotated"
        for name in ("short_factor", "long_factor")
        if name in made and len(made[name]) != pairs
    ]


def _unknown(kind: str, key: str, value: Any, known: frozenset[str]) -> str:
    close = get_close_matches(key, sorted(known), n=1)
    hint = f" (nearest known: '{close[0]}')" if close else ""
    return f"rope_type '{kind}' has {key}={value!r}, which the bridge does not know{hint}"
