"""Roles under their other names: ``roles.policy`` is ``roles.actor``."""

from typing import Any

from hybridflow.recipe.catalogue_roles import ROLES
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.source import KeyPath, Source
from hybridflow.recipe.targets import move


def canonical_roles(source: Source) -> None:
    """Give every role of the recipe the name that all else knows it by."""
    roles = source.data.get("roles")
    if not isinstance(roles, dict):
        return
    for name in [*roles]:
        canonical = ROLES.canonical(name)
        if canonical == name:
            continue
        if canonical in roles:
            what = f"`roles.{name}` and `roles.{canonical}` are the same role"
            source.faults.append(Fault(source.origin(("roles", name)), what, "keep one of the two"))
            del roles[name]
            continue
        roles[canonical] = roles.pop(name)
        move(source, ("roles", name), ("roles", canonical))
    for section in roles.values():
        if isinstance(section, dict):
            _canonical_host(section)


def canonical_override(path: KeyPath, value: Any) -> KeyPath:
    """The place of an override whose role may have another name; its value may name a role too."""
    if path[0] != "roles" or len(path) < 2:
        return path
    if isinstance(value, dict):
        _canonical_host(value)
    return ("roles", ROLES.canonical(str(path[1])), *path[2:])


def _canonical_host(section: dict[str, Any]) -> None:
    if isinstance(section.get("colocate"), str):
        section["colocate"] = ROLES.canonical(section["colocate"])
