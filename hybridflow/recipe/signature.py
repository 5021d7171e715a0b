"""What a call or a function takes, gives and can be told."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hybridflow.recipe.axes import FieldType
from hybridflow.recipe.rules import Rule

RoleKind = Literal["model", "value", "rollout", "reward"]
"""``model``: a Megatron model that ends in the vocabulary; ``value``: in one number a token."""

MEGATRON_KINDS: tuple[RoleKind, ...] = ("model", "value")


@dataclass(frozen=True)
class Input:
    """A parameter that takes a field of any of ``types``."""

    types: tuple[FieldType, ...]
    optional: bool = False
    description: str = ""

    def accepts(self, given: FieldType) -> bool:
        """Whether a field of type ``given`` fits; descriptions do not matter."""
        return any(one.accepts(given) for one in self.types)


@dataclass(frozen=True)
class Option:
    """A further key of a node or a parameter of a reward.

    Attributes:
        choices: what it may be; of a registry also what is registered later.
        rule: what a value of the right type must hold beside; numbers are finite in any case.
    """

    dtype: Literal["str", "int", "float", "bool", "list of float", "mapping"]
    default: Any = None
    required: bool = False
    choices: Collection[str] = ()
    description: str = ""
    rule: Rule | None = None

    def problem(self, value: Any) -> str | None:
        """Why ``value`` does not fit, or None; null fits where it is the default."""
        if value is None and self.default is None and not self.required:
            return None
        if not _fits(self.dtype, value):
            return f"must be {self.dtype}, not {value!r}"
        if any(not math.isfinite(number) for number in _numbers(value)):
            return f"must be finite, not {value!r}"
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}, not {value!r}"
        return None if self.rule is None else self.rule(value)


def _numbers(value: Any) -> list[float]:
    values = value if isinstance(value, list) else [value]
    return [number for number in values if isinstance(number, float)]


def _fits(dtype: str, value: Any) -> bool:
    if dtype == "list of float":
        return isinstance(value, list) and bool(value) and all(_fits("float", v) for v in value)
    if isinstance(value, bool):
        return dtype == "bool"
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "float": (int, float),
        "mapping": (dict,),
    }
    return isinstance(value, kinds.get(dtype, ()))


@dataclass(frozen=True)
class Signature:
    """What a call or a function takes, gives and can be told.

    Attributes:
        description: one sentence.
        inputs: parameter -> what it takes.
        outputs: output -> its type; a node may name any subset of them.
        options: further keys that a node of this signature may have.
        trainable: only a role that is trained (has an optimizer) offers the call.
        fresh_batch: the outputs form a batch of their own (rows were chosen anew).
        compares_samples: needs two samples of a prompt or more.
        settings: keys of the recipe's ``algorithm`` that a function reads.
    """

    description: str
    inputs: Mapping[str, Input] = field(default_factory=dict)
    outputs: Mapping[str, FieldType] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    trainable: bool = False
    fresh_batch: bool = False
    compares_samples: bool = False
    settings: tuple[str, ...] = ()
