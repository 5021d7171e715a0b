"""Which architectures the bridge knows, and what a table of one says. Imports no torch."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cached_property
from typing import Any

HfConfig = dict[str, Any]


class Kind(Enum):
    """The transform between a row's HuggingFace tensors and its Megatron tensor."""

    PLAIN = "plain"
    QKV = "qkv"
    GATED = "gated"
    VOCABULARY = "vocabulary"


@dataclass(frozen=True)
class Row:
    """One line of an architecture's table.

    Attributes:
        huggingface: name and shape of each HuggingFace tensor; ``{}`` stands for the layer, shapes
            are names of sizes (see ``sizes``).
        megatron: the Megatron parameter; with a second name where transformer-engine's differs.
        kind: the transform.
        cut: the dimension that tensor parallelism cuts (0 rows, 1 columns); None: replicated.
        only: the config's property that the row needs ("tied", "untied"); None: always.
    """

    huggingface: dict[str, tuple[str, ...]]
    megatron: tuple[str, ...]
    kind: Kind = Kind.PLAIN
    cut: int | None = None
    only: str | None = None


@dataclass(frozen=True)
class Match:
    """A row, at the layer that a name stands for (None outside the layers)."""

    row: Row
    layer: int | None

    @cached_property
    def huggingface(self) -> dict[str, tuple[str, ...]]:
        """HuggingFace names and symbolic shapes at this layer."""
        return {name.format(self.layer): shape for name, shape in self.row.huggingface.items()}


@dataclass(frozen=True)
class Architecture:
    """What the bridge knows of one HuggingFace architecture: tables only.

    Attributes:
        name: as in config.json's ``architectures``.
        model_type: as in config.json.
        rows: the tensors.
        transformer: config.json -> arguments of Megatron's TransformerConfig that differ from
            those all dense models share.
        required: fields that must hold one of these values where present.
        defaults: fields that the table reads, with the value that an absent one stands for.
        harmless: further fields that change nothing in the model's computation.
        ignored: patterns of checkpoint tensors that carry no weight of their own.
    """

    name: str
    model_type: str
    rows: tuple[Row, ...]
    transformer: Callable[[HfConfig], dict[str, Any]]
    required: dict[str, tuple[Any, ...]]
    defaults: dict[str, Any]
    harmless: frozenset[str]
    ignored: tuple[str, ...] = ()

    def matches(self, config: HfConfig) -> Iterator[Match]:
        """Every row at every layer of a model of this config, in the order of the model."""
        before, inside, after = self._sections()
        layers = range(config["num_hidden_layers"])
        blocks = [
            [Match(row, None) for row in before],
            [Match(row, layer) for layer in layers for row in inside],
            [Match(row, None) for row in after],
        ]
        for match in (match for block in blocks for match in block):
            if match.row.only in (None, "tied" if tied(config) else "untied"):
                yield match

    def _sections(self) -> tuple[list[Row], list[Row], list[Row]]:
        """The rows before, inside and after the layers."""
        per_layer = [i for i, row in enumerate(self.rows) if "{}" in row.megatron[0]]
        first, last = per_layer[0], per_layer[-1] + 1
        rows = list(self.rows)
        return rows[:first], rows[first:last], rows[last:]

    def tensors(self, config: HfConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor of such a checkpoint, with its shape."""
        size = sizes(config)
        return {
            name: tuple(size[dimension] for dimension in shape)
            for match in self.matches(config)
            for name, shape in match.huggingface.items()
        }

    def by_megatron(self, name: str, config: HfConfig) -> Match:
        """The row of a Megatron parameter (its name with the global layer).

        Raises:
            ValueError: when no row covers the name.
        """
        for match in self._candidates(name, lambda row: row.megatron, config):
            return match
        known = sorted({pattern for row in self.rows for pattern in row.megatron})
        raise ValueError(_uncovered("Megatron parameter", name, known, self))

    def by_huggingface(self, name: str, config: HfConfig) -> Match:
        """The row of a HuggingFace tensor.

        Raises:
            ValueError: when no row covers the name.
        """
        for match in self._candidates(name, lambda row: tuple(row.huggingface), config):
            return match
        known = sorted({pattern for row in self.rows for pattern in row.huggingface})
        raise ValueError(_uncovered("HuggingFace tensor", name, known, self))

    def _candidates(
        self, name: str, patterns: Callable[[Row], tuple[str, ...]], config: HfConfig
    ) -> Iterator[Match]:
        for row in self.rows:
            if row.only not in (None, "tied" if tied(config) else "untied"):
                continue
            for pattern in patterns(row):
                found = _layer(pattern, name)
                if found is not None:
                    yield Match(row, None if found == "" else int(found))

    def is_ignored(self, name: str, config: HfConfig) -> bool:
        """True for a checkpoint's tensor that carries no weight of its own."""
        patterns = self.ignored + (("lm_head.weight",) if tied(config) else ())
        return any(_layer(pattern, name) is not None for pattern in patterns)


def _layer(pattern: str, name: str) -> str | None:
    """The layer number of a name that fits the pattern, "" when it has none, None: no fit."""
    expression = re.escape(pattern).replace(r"\{\}", r"(0|[1-9]\d*)")
    found = re.fullmatch(expression, name)
    if found is None:
        return None
    return found.group(1) if found.groups() else ""


def _uncovered(what: str, name: str, known: list[str], architecture: Architecture) -> str:
    generic = re.sub(r"\.\d+\.", ".{}.", name)
    close = get_close_matches(generic, known, n=1)
    hint = f" (nearest known: '{close[0]}')" if close else ""
    return (
        f"no mapping covers the {what} '{name}' of {architecture.name}{hint}; register a Row for "
        f"'{generic}' in megatron_bridge/models/{architecture.model_type}.py, or add it to "
        "`ignored` there if it carries no weight"
    )


def tied(config: HfConfig) -> bool:
    """True when the output layer is the embedding."""
    return bool(config.get("tie_word_embeddings", False))


def head_dim(config: HfConfig) -> int:
    """The size of one attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def kv_heads(config: HfConfig) -> int:
    """The number of key-value heads."""
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def sizes(config: HfConfig) -> dict[str, int]:
    """The sizes that a table's shapes name."""
    return {
        "hidden": config["hidden_size"],
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "head_dim": head_dim(config),
        "q": config["num_attention_heads"] * head_dim(config),
        "kv": kv_heads(config) * head_dim(config),
    }


def _table() -> dict[str, Architecture]:
    from megatron_bridge.models import llama, qwen2, qwen3

    return {module.ARCHITECTURE.name: module.ARCHITECTURE for module in (llama, qwen2, qwen3)}


def supported() -> list[str]:
    """Names of the architectures that the bridge knows."""
    return sorted(_table())


def architecture(config: HfConfig) -> Architecture:
    """The table of a config's architecture.

    Args:
        config: config.json as a dict; ``architectures`` decides, else ``model_type``.

    Raises:
        ValueError: for an architecture without a table.
    """
    table = _table()
    names = config.get("architectures") or []
    for name in names:
        if name in table:
            return table[name]
    model_type = config.get("model_type")
    if not names:
        for known in table.values():
            if known.model_type == model_type:
                return known
    asked = ", ".join(names) or f"model_type={model_type}"
    raise ValueError(
        f"the bridge has no table for {asked}; it supports {', '.join(supported())}. Register one: "
        "add megatron_bridge/models/<model_type>.py with an Architecture (docs/bridge.md)"
    )
