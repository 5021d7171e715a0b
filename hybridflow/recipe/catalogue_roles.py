"""The roles that a recipe may name, and their other names. No torch."""

from dataclasses import dataclass

from hybridflow.recipe.registry import Registry
from hybridflow.recipe.signature import RoleKind


@dataclass(frozen=True)
class RoleEntry:
    """A role with a section of its own in the recipe; further roles have names of the user's."""

    kind: RoleKind
    description: str


ROLES = Registry(
    "role",
    {
        "actor": RoleEntry("model", "the trained model"),
        "reference": RoleEntry("model", "the frozen model, for the KL term"),
        "critic": RoleEntry("value", "the value model"),
        "rollout": RoleEntry("rollout", "the servers that sample"),
        "reward": RoleEntry("reward", "what scores"),
    },
    aliases={"policy": "actor", "ref": "reference", "value": "critic", "sampler": "rollout"},
)
