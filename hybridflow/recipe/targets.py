"""The short form of a reward: ``_target_: my_pkg.my_reward`` with its parameters beside it."""

from typing import Any

from hybridflow.recipe.faults import Fault
from hybridflow.recipe.schema_rewards import FunctionSection, RewardSection
from hybridflow.recipe.section import Section
from hybridflow.recipe.source import KeyPath, Source

TARGET = "_target_"


def spell_out(source: Source, roles: list[str]) -> None:
    """Write ``{_target_: F, a: 1}`` of the given roles as ``{function: F, parameters: {a: 1}}``;
    keys that the section itself declares stay what they are."""
    for role in roles:
        section = source.data["roles"][role]
        if not isinstance(section, dict):
            continue
        _spell_out(source, ("roles", role), section, RewardSection)
        parts = section.get("functions")
        for name, part in parts.items() if isinstance(parts, dict) else ():
            if isinstance(part, dict):
                _spell_out(source, ("roles", role, "functions", name), part, FunctionSection)


def _spell_out(source: Source, path: KeyPath, section: dict[str, Any], kind: type[Section]) -> None:
    if TARGET not in section:
        return
    for key in ("function", "functions", "parameters"):
        if key in section:
            what = f"`{'.'.join(map(str, path))}` has `{key}` beside `{TARGET}`"
            fix = f"keep one of the two; the keys beside `{TARGET}` are the parameters"
            source.faults.append(Fault(source.origin((*path, key)), what, fix))
            del section["parameters" if key == "parameters" else TARGET]
            break
    if TARGET not in section:
        return
    section["function"] = section.pop(TARGET)
    move(source, (*path, TARGET), (*path, "function"))
    beside = [key for key in section if key not in kind.model_fields]
    section["parameters"] = {key: section.pop(key) for key in beside}
    for key in beside:
        move(source, (*path, key), (*path, "parameters", key))


def move(source: Source, old: KeyPath, new: KeyPath) -> None:
    """The origins of a key and of all that it holds."""
    for path in [path for path in source.origins if path[: len(old)] == old]:
        source.origins[(*new, *path[len(old) :])] = source.origins.pop(path)
