"""What adapter_config.json says of a LoRA adapter; refused is what a merge would get wrong."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_bridge.huggingface.safetensors_file import listed

# Fields that tell how the adapter was trained or found, and change nothing about its merge.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
_READ = {
    "alpha_pattern",
    "bias",
    "fan_in_fan_out",
    "init_lora_weights",
    "lora_alpha",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "use_dora",
    "use_rslora",
}
# Others (pissa, olora, corda, loftq, lora_ga ...) change the base weights when training starts.
_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")

_EVERY_LINEAR = "all-linear"


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of a LoRA adapter that its merge depends on."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: list[str] | str
    modules_to_save: list[str]
    rank_stabilized: bool
    dora: bool
    transposed: bool

    def targets(self, module: str) -> bool:
        """Whether ``target_modules`` means this module: by regular expression or by ending."""
        if self.target_modules == _EVERY_LINEAR:
            return True
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, module) is not None
        return any(f".{module}".endswith(f".{target}") for target in self.target_modules)

    def saves(self, module: str) -> bool:
        """Whether ``modules_to_save`` means this module or one that it lies in, by its ending."""
        steps = module.split(".")
        around = (".".join(steps[:depth]) for depth in range(1, len(steps) + 1))
        return any(outer.endswith(saved) for outer in around for saved in self.modules_to_save)

    def rank_of(self, module: str) -> int:
        """The rank of one module's factors."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What one module's B @ A is multiplied by."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def parse(fields: Mapping[str, Any]) -> AdapterConfig:
    """Check the content of adapter_config.json.

    Raises:
        ValueError: naming all fields that are wrong or that no merge can follow.
    """
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"peft_type {kind!r} cannot be merged; the bridge merges LORA")
    faults = [*_unsupported(fields), *_malformed(fields)]
    if faults:
        raise ValueError(f"the bridge cannot merge this adapter: {listed(faults)}")
    return AdapterConfig(
        rank=fields.get("r", 8),
        alpha=fields.get("lora_alpha", 8),
        rank_pattern=fields.get("rank_pattern") or {},
        alpha_pattern=fields.get("alpha_pattern") or {},
        target_modules=fields.get("target_modules") or [],
        modules_to_save=fields.get("modules_to_save") or [],
        rank_stabilized=fields.get("use_rslora", False),
        dora=fields.get("use_dora", False),
        transposed=fields.get("fan_in_fan_out", False),
    )


def _unsupported(fields: Mapping[str, Any]) -> list[str]:
    faults = []
    start = fields.get("init_lora_weights")
    if start not in _STARTS:
        faults.append(
            f"init_lora_weights {start!r} changed the base weights; have PEFT convert it to plain "
            "LoRA (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if fields.get("bias", "none") != "none":
        faults.append(f"bias {fields['bias']!r}: trained biases are not merged, only 'none' is")
    unknown = sorted(k for k, value in fields.items() if value and k not in _HARMLESS | _READ)
    return faults + [f"{key} {fields[key]!r} is not supported" for key in unknown]


def _malformed(fields: Mapping[str, Any]) -> list[str]:
    ranks = [fields.get("r", 8), *_values(fields, "rank_pattern")]
    alphas = [fields.get("lora_alpha", 8), *_values(fields, "alpha_pattern")]
    patterns = [*_keys(fields, "rank_pattern"), *_keys(fields, "alpha_pattern")]
    targets = fields.get("target_modules") or []
    if isinstance(targets, str):
        patterns.append(targets)
        targets = []
    flags = [fields.get(key, False) for key in ("use_rslora", "use_dora", "fan_in_fan_out")]
    checks = (
        ("r or rank_pattern", all(type(rank) is int and rank > 0 for rank in ranks)),
        ("lora_alpha or alpha_pattern", all(map(_is_number, alphas))),
        ("rank_pattern, alpha_pattern or target_modules", all(map(_is_pattern, patterns))),
        ("target_modules", _is_names(targets)),
        ("modules_to_save", _is_names(fields.get("modules_to_save") or [])),
        ("use_rslora, use_dora or fan_in_fan_out", all(type(flag) is bool for flag in flags)),
    )
    return [f"{what} has a value of the wrong kind" for what, right in checks if not right]


def _values(fields: Mapping[str, Any], key: str) -> list[Any]:
    value = fields.get(key) or {}
    return list(value.values()) if isinstance(value, dict) else [value]


def _keys(fields: Mapping[str, Any], key: str) -> list[Any]:
    value = fields.get(key) or {}
    return list(value) if isinstance(value, dict) else [None]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_pattern(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        re.compile(value)
    except (re.error, RecursionError):
        return False
    return True


def _by_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first pattern that ends the module's name, as PEFT looks it up."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise
