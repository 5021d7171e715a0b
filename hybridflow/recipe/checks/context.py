"""What the checks share: the recipe, its compiled stages, the model's config, read once."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridflow.recipe.compile import compile_stages, make_plan
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.plan import Plan, Stage
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.schema_roles import AnyModelSection, RolesSection
from hybridflow.recipe.source import KeyPath


class Context:
    """A recipe under check; what cannot be read is None and is reported by one check alone."""

    def __init__(self, recipe: Recipe, untrusted: frozenset[KeyPath] = frozenset()) -> None:
        self.recipe = recipe
        self._untrusted = untrusted

    def trusts(self, key: str) -> bool:
        """Whether all that a dotted key holds is the user's; ``roles.*``: the roles' names."""
        if key.endswith(".*"):
            parent = tuple(key.split(".")[:-1])
            return not any(bad[:-1] == parent for bad in self._untrusted)
        path = tuple(key.split("."))
        return not any(_overlap(path, bad) for bad in self._untrusted)

    @cached_property
    def compiled(self) -> tuple[list[Stage], list[Fault]]:
        """Stages whose graph could be read, and the graphs' faults."""
        return compile_stages(self.recipe)

    @property
    def stages(self) -> list[Stage]:
        return self.compiled[0]

    @property
    def has_main(self) -> bool:
        """Whether the main stage's graph could be read and has nodes; else that is a fault."""
        return any(stage.name == "main" and stage.graph.nodes for stage in self.stages)

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.recipe, self.stages)

    @cached_property
    def models(self) -> dict[str, AnyModelSection]:
        """Model roles, without further ones that do not hold what the user wrote."""
        return {
            role: section
            for role, section in self.recipe.roles.models().items()
            if role in RolesSection.model_fields or self.trusts(f"roles.{role}")
        }

    @cached_property
    def model_folder(self) -> Path | None:
        """The model's folder where there is one."""
        folder = Path(self.recipe.model.path)
        return folder if folder.is_dir() else None

    @cached_property
    def hf_config(self) -> dict[str, Any] | None:
        """config.json with the sizes that every check needs, or None."""
        if self.model_folder is None:
            return None
        try:
            config = json.loads((self.model_folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return config if isinstance(config, dict) and not missing_sizes(config) else None

    def fault(self, key: str, what: str, fix: str) -> Fault:
        """A fault at the line of a dotted key."""
        return Fault(self.recipe.origin(key), what, fix)


def _overlap(path: KeyPath, other: KeyPath) -> bool:
    """Whether one of the two keys holds the other."""
    shared = min(len(path), len(other))
    return path[:shared] == other[:shared]


@dataclass(frozen=True)
class Check:
    """A check and the keys whose values it relies on."""

    reads: tuple[str, ...]
    find: Callable[[Context], Iterable[Fault]]


SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_hidden_layers", "vocab_size"),
)


def missing_sizes(config: dict[str, Any]) -> list[str]:
    """Sizes that are no positive integer in a config.json."""
    return [key for key in SIZES if type(config.get(key)) is not int or config[key] < 1]
