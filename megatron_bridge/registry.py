"""Which architectures the bridge knows, and what a table of one says. Imports no torch."""

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from typing import Any, NamedTuple

HfConfig = dict[str, Any]

STACK = "+"
PADDED = "vocab"


@dataclass(frozen=True)
class Axes:
    """A tensor's dimensions, each a product of named axes: ``group + head_dim, hidden``.

    A comma separates dimensions, blanks separate the axes of one dimension, the slowest first.
    ``+`` is the axis along which the parts of a row are stacked.
    """

    dimensions: tuple[tuple[str, ...], ...]

    @classmethod
    @cache
    def parse(cls, text: str) -> "Axes":
        """The axes that ``text`` names."""
        return cls(tuple(tuple(dimension.split()) for dimension in text.split(",")))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All axes, the slowest first."""
        return tuple(axis for dimension in self.dimensions for axis in dimension)


@dataclass(frozen=True)
class Part:
    """A HuggingFace tensor of a row, or the rows of one that hold this part.

    Attributes:
        name: with ``{layer}`` and ``{expert}``. A name that a row lists several times holds those
            parts behind one another on its first dimension.
        axes: as ``Axes.parse`` reads. Each is an axis of the Megatron tensor, or ``expert`` (the
            tensor holds all experts), or fills the stack axis.
    """

    name: str
    axes: str


@dataclass(frozen=True)
class Row:
    """One line of an architecture's table: a Megatron tensor and what it is made of.

    Attributes:
        megatron: its name in a model of our layers, with ``{layer}`` and ``{expert}``.
        shape: its axes, as ``Axes.parse`` reads.
        parts: the HuggingFace tensors, in the order in which ``+`` stacks them.
        cut: the axis that tensor parallelism cuts; None: every rank holds the tensor.
        fused: its name in transformer-engine's layers, where that differs.
        key: its name in a distributed checkpoint, where that is neither ``fused`` nor ``megatron``.
        layers: the kind of layer that has it, "dense" or "moe"; None: both.
        dtype: of the live model's tensor whatever the model's is ("float32"); None: the model's.
        when: whether a model of a config has it; None: always.
    """

    megatron: str
    shape: str
    parts: tuple[Part, ...]
    cut: str | None = None
    fused: str | None = None
    key: str | None = None
    layers: str | None = None
    dtype: str | None = None
    when: Callable[[HfConfig], bool] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of its parameter in a live model."""
        return (self.megatron,) if self.fused is None else (self.megatron, self.fused)

    @property
    def checkpoint_key(self) -> str:
        """Its name in a distributed checkpoint, with ``{layer}``."""
        return self.key or self.fused or self.megatron

    @property
    def per_layer(self) -> bool:
        """True when each layer has one."""
        return "{layer}" in self.megatron

    @property
    def per_expert(self) -> bool:
        """True when each expert has one."""
        return "{expert}" in self.megatron


def always_dense(_config: HfConfig, _layer: int) -> bool:
    """No layer has experts."""
    return False


@dataclass(frozen=True)
class Architecture:
    """What the bridge knows of one HuggingFace architecture: tables only.

    Attributes:
        name: as in config.json's ``architectures``.
        model_type: as in config.json.
        rows: the tensors, in the order of the model.
        transformer: config.json -> arguments of Megatron's TransformerConfig that differ from
            those all models share; with ``multi_latent_attention`` of MLATransformerConfig.
        required: fields that must hold one of these values where present.
        defaults: fields that the table reads, with the value that an absent one stands for.
        harmless: further fields that change nothing in the model's computation.
        ignored: patterns of checkpoint tensors that carry no weight of the model's own.
        extra_sizes: config.json -> sizes of axes beyond those that all models have.
        is_moe: whether a layer has experts.
        features: config.json -> what our layers need and TransformerConfig cannot say.
        refusals: config.json -> further reasons why the model is not supported.
        gpt: config.json -> arguments of GPTModel; None: those of dense models.
        aliases: further names in ``architectures`` for the same tensors and computation.
        classifier: transformers' class that ends in scores, where that is not named like ``name``.
        models: published models, for the documentation.
    """

    name: str
    model_type: str
    rows: tuple[Row, ...]
    transformer: Callable[[HfConfig], dict[str, Any]]
    required: dict[str, tuple[Any, ...]]
    defaults: dict[str, Any]
    harmless: frozenset[str]
    ignored: tuple[str, ...] = ()
    extra_sizes: Callable[[HfConfig], dict[str, int]] = lambda _config: {}
    is_moe: Callable[[HfConfig, int], bool] = always_dense
    features: Callable[[HfConfig], dict[str, Any]] = lambda _config: {}
    refusals: Callable[[HfConfig], list[str]] = lambda _config: []
    gpt: Callable[[HfConfig], dict[str, Any]] | None = None
    aliases: tuple[str, ...] = ()
    classifier: str | None = None
    models: str = ""

    @property
    def classifier_name(self) -> str:
        """Of such a model that ends in scores, as in config.json's ``architectures``."""
        return self.classifier or self.name.replace(_CAUSAL, CLASSIFICATION)

    @property
    def token_classifier_name(self) -> str:
        """The same of one whose scores have a bias."""
        return self.classifier_name.replace(CLASSIFICATION, TOKEN_CLASSIFICATION)

    def sizes(self, config: HfConfig) -> dict[str, int]:
        """The size of every axis that the rows name."""
        heads, groups = config["num_attention_heads"], kv_heads(config)
        base = {
            "hidden": config["hidden_size"],
            "ffn": config.get("intermediate_size") or 0,
            "vocab": config["vocab_size"],
            "head_dim": head_dim(config),
            "group": groups,
            "query": heads // groups,
            "head": heads,
            "labels": labels(config),
        }
        return base | self.extra_sizes(config)

    def stacks_layers(self, config: HfConfig) -> bool:
        """True when a distributed checkpoint holds all layers of a parameter in one tensor.

        Megatron does so where all layers are alike, as ``moe_layer_freq`` says.
        """
        return not isinstance(self.transformer(config).get("moe_layer_freq", 1), list)

    def rows_of(self, config: HfConfig) -> list[Row]:
        """The rows that a model of this config has."""
        return [row for row in self.rows if row.when is None or row.when(config)]

    def is_ignored(self, name: str, config: HfConfig) -> bool:
        """True for a checkpoint's tensor that carries no weight of the model's own."""
        patterns = self.ignored + (("lm_head.weight",) if tied(config) else ())
        layers = str(config["num_hidden_layers"])
        return any(
            _pattern(pattern.replace("{layers}", layers)).fullmatch(name) for pattern in patterns
        )

    def patterns(self, config: HfConfig) -> set[str]:
        """Names of all HuggingFace tensors, with placeholders."""
        return {part.name for row in self.rows_of(config) for part in row.parts}


@cache
def _pattern(text: str) -> re.Pattern[str]:
    """Placeholders stand for numbers, ``*`` for anything."""
    escaped = re.escape(text).replace(r"\*", ".*")
    return re.compile(re.sub(r"\\\{\w*\\\}", r"(?:0|[1-9]\\d*)", escaped))


def uncovered(what: str, name: str, known: set[str], table: Architecture) -> str:
    """Says that no row has a tensor, and what to register."""
    generic = _generic(name)
    close = get_close_matches(generic, sorted(known), n=1)
    hint = f" (nearest known: '{close[0]}')" if close else ""
    return (
        f"no mapping covers the {what} '{name}' of {table.name}{hint}; register a Row for "
        f"'{generic}' in {_module_file(table)}, or add it to `ignored` there if it carries no "
        "weight"
    )


def _generic(name: str) -> str:
    name = re.sub(r"\bexperts\.\d+\.", "experts.{expert}.", name)
    return re.sub(r"\blayers\.\d+\.", "layers.{layer}.", name)


def _module_file(table: Architecture) -> str:
    return f"megatron_bridge/models/{module_of(table)}.py"


def tied(config: HfConfig) -> bool:
    """True when the output layer is the embedding."""
    return bool(config.get("tie_word_embeddings", False)) and not has_value_head(config)


def untied(config: HfConfig) -> bool:
    """True when the output layer has weights of its own."""
    return not tied(config) and not has_value_head(config)


def has_value_head(config: HfConfig) -> bool:
    """True when the model ends in scores, not in a vocabulary: ``*ForSequenceClassification`` or
    ``*ForTokenClassification``."""
    return any(name.endswith(SCORING) for name in config.get("architectures") or ())


def has_score_bias(config: HfConfig) -> bool:
    """True when the scores of such a model have a bias."""
    names = config.get("architectures") or ()
    token = any(name.endswith(TOKEN_CLASSIFICATION) for name in names)
    return token and bool(config.get("token_classification_bias", True))


def labels(config: HfConfig) -> int:
    """Scores per token of a model with a value head."""
    if config.get("num_labels") is not None:
        return config["num_labels"]
    return len(config.get("id2label") or (0, 1))


def head_dim(config: HfConfig) -> int:
    """The size of one attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def kv_heads(config: HfConfig) -> int:
    """The number of key-value heads."""
    return config.get("num_key_value_heads") or config["num_attention_heads"]


class Cut(NamedTuple):
    """A size that a parallel size must divide.

    Attributes:
        field: config.json's name for it.
        by: the parallel size, "tp", "etp" or "ep".
        shared_rows: rows of the tensor where ranks may share one of its heads: then the parallel
            size may also be a multiple of ``size`` that divides these. 0: ranks share nothing.
    """

    field: str
    size: int
    by: str
    shared_rows: int = 0

    def fits(self, parallel: int) -> bool:
        """Whether this parallel size can cut it."""
        if self.size % parallel == 0:
            return True
        return bool(self.shared_rows) and not (parallel % self.size or self.shared_rows % parallel)


# Axes that layouts cut, as config.json calls them.
_FIELDS = {
    "group": "num_key_value_heads",
    "head": "num_attention_heads",
    "ffn": "intermediate_size",
    "moe_ffn": "moe_intermediate_size",
    "shared_ffn": "the shared experts' width",
    "expert": "the number of experts",
}


def cut_sizes(config: HfConfig) -> list[Cut]:
    """Every size of the model that tensor or expert parallelism cuts."""
    table = architecture(config)
    config = {**table.defaults, **config}
    size = table.sizes(config)
    found = [Cut("num_attention_heads", size["head"], "tp")]
    for row in table.rows_of(config):
        if row.cut not in (None, PADDED):
            by = "etp" if row.per_expert else "tp"
            name = _FIELDS.get(row.cut, row.cut)
            # Megatron gathers q, k and v over the ranks that share a key-value head.
            rows = (size["head"] + 2 * size["group"]) * size["head_dim"]
            found.append(Cut(name, size[row.cut], by, rows if row.cut == "group" else 0))
        if row.per_expert:
            found.append(Cut(_FIELDS["expert"], size["expert"], "ep"))
    return list(dict.fromkeys(found))


CLASSIFICATION = "ForSequenceClassification"
TOKEN_CLASSIFICATION = "ForTokenClassification"
SCORING = (CLASSIFICATION, TOKEN_CLASSIFICATION)
_CAUSAL = "ForCausalLM"


@cache
def _modules() -> dict[str, tuple[str, Architecture]]:
    """Every architecture, with the module of models/ that holds its table."""
    from megatron_bridge import models

    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(models.__path__)):
        module = importlib.import_module(f"{models.__name__}.{name}")
        for table in getattr(module, "ARCHITECTURES", ()):
            found[table.name] = (name, table)
    return found


def module_of(table: Architecture) -> str:
    """The module of models/ that holds a table."""
    return _modules()[table.name][0]


def supported() -> list[str]:
    """Names of the architectures that the bridge knows."""
    return sorted(_modules())


def tables() -> list[Architecture]:
    """Every table, by the name of its architecture."""
    return [_modules()[name][1] for name in supported()]


def architecture(config: HfConfig) -> Architecture:
    """The table of a config's architecture.

    Args:
        config: config.json as a dict; ``architectures`` decides, else ``model_type``.

    Raises:
        ValueError: for an architecture without a table.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json sets architectures={names!r}, which must be a list of texts")
    for name in names:
        base = name.replace(TOKEN_CLASSIFICATION, CLASSIFICATION).replace(CLASSIFICATION, _CAUSAL)
        found = _by_name(base)
        if found is not None:
            return found
    model_type = config.get("model_type")
    if not names:
        for known in tables():
            if known.model_type == model_type:
                return known
    asked = ", ".join(names) or f"model_type={model_type}"
    raise ValueError(
        f"the bridge has no table for {asked}; it supports {', '.join(supported())} and their "
        f"{' and '.join(SCORING)}. Register one: add megatron_bridge/models/<family>.py with its "
        "ARCHITECTURES (docs/add_a_model.md)"
    )


def _by_name(name: str) -> Architecture | None:
    for table in tables():
        if name == table.name or name in table.aliases:
            return table
    return None
