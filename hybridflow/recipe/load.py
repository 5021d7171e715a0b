"""From a file and overrides to a typed recipe, or to every fault at once."""

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hybridflow.recipe.catalogue_roles import ROLES
from hybridflow.recipe.faults import Fault, RecipeError
from hybridflow.recipe.names import hint
from hybridflow.recipe.own_code import import_own
from hybridflow.recipe.ranges import Wrong, is_graph_file
from hybridflow.recipe.role_names import canonical_override, canonical_roles
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.schema_rewards import RewardSection
from hybridflow.recipe.schema_roles import RolesSection, further_role_section
from hybridflow.recipe.section import Section
from hybridflow.recipe.source import (
    COMMAND_LINE,
    KeyPath,
    Source,
    flow_yaml,
    parse_yaml,
    read_yaml,
    to_yaml,
)
from hybridflow.recipe.targets import spell_out

_OVERRIDE = re.compile(r"(?P<key>[\w-]+(?:\.[\w-]+)*)=(?P<value>.*)", re.DOTALL)


@dataclass
class Draft:
    """A recipe as far as it could be read.

    Attributes:
        recipe: None when too little was left to go on; faulty values hold their default or example.
        faults: what is wrong so far.
        untrusted: keys whose value is not the user's; checks that read them say nothing.
    """

    recipe: Recipe | None
    faults: list[Fault] = field(default_factory=list)
    untrusted: set[KeyPath] = field(default_factory=set)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file, changed by ``key.path=value`` overrides.

    Raises:
        RecipeError: with every fault of its form; ``check`` looks at all the rest.
    """
    draft = read_draft(path, overrides)
    if draft.faults or draft.recipe is None:
        raise RecipeError(draft.faults)
    return draft.recipe


def resolved_yaml(recipe: Recipe) -> str:
    """The recipe with every default and override written out, graphs of files among them: it loads
    to the same run, whatever becomes of those files."""
    told = recipe.model_dump()
    for section in (told, told["warm_start"] or {}):
        if is_graph_file(section.get("dataflow")):
            section["dataflow"] = read_yaml(section["dataflow"]).data or section["dataflow"]
    return to_yaml(told)


def read_draft(path: str | Path, overrides: Sequence[str] = ()) -> Draft:
    """Read as much as can be read, and collect the faults."""
    source = read_yaml(path)
    if source.data is None and not source.faults:
        source.data = {}
    if source.data is not None and not isinstance(source.data, dict):
        source.faults.append(Fault(str(path), "a recipe is a mapping", "write `key: value` lines"))
    if not isinstance(source.data, dict):
        return Draft(None, source.faults)
    canonical_roles(source)
    for override in overrides:
        _override(source, override)
    canonical_roles(source)  # an override may give all roles at once, or `colocate` a name
    return _validate(source)


def _override(source: Source, text: str) -> None:
    """Set one dotted key; sections on the way are made when absent."""
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        what = f"'{text}' is no override"
        source.faults.append(Fault(COMMAND_LINE, what, "write key.path=value"))
        return
    value = parse_yaml(match["value"], COMMAND_LINE, numbered=False)
    if value.faults:
        source.faults.extend(value.faults)
        return
    path = canonical_override(tuple(match["key"].split(".")), value.data)
    section = source.data
    for depth, key in enumerate(path[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
            source.origins[path[:depth]] = COMMAND_LINE
        section = section[key]
        if not isinstance(section, dict):
            what = f"'{text}' sets a key within `{'.'.join(map(str, path[:depth]))}`, a plain value"
            source.faults.append(Fault(COMMAND_LINE, what, "set that value itself"))
            return
    if isinstance(section.get(path[-1]), dict):
        stale = [known for known in source.origins if known[: len(path)] == path]
        for known in stale:
            del source.origins[known]
    section[path[-1]] = value.data
    source.origins.update({(*path, *inner): COMMAND_LINE for inner in value.origins})


def _validate(source: Source) -> Draft:
    draft = Draft(None, source.faults)
    roles = source.data.get("roles")
    if isinstance(roles, dict):
        others = [name for name in roles if name not in RolesSection.model_fields]
        spell_out(source, [*others, *({"reward"} & roles.keys())])
    data = copy.deepcopy(source.data)
    _drop_unknown_roles(data, source, draft)
    try:
        draft.recipe = Recipe.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        for detail in details:
            detail["loc"] = _without_tag(detail["loc"])
        draft.faults.extend(_translate(detail, source) for detail in details)
        draft.recipe = _repaired(data, details, draft.untrusted)
    if draft.recipe is not None:
        draft.recipe._origins = source.origins
        if found := import_own(draft.recipe.imports, source):
            draft.faults.extend(found)
            draft.untrusted |= {("dataflow",), ("warm_start", "dataflow")}  # names may be missing
    return draft


def _without_tag(place: KeyPath) -> KeyPath:
    """An error's place without the name of the section that pydantic took a role for."""
    named = [name for name in RolesSection.model_fields if name != "reward"]
    if len(place) < 3 or place[0] != "roles" or place[1] in named:
        return place
    return (*place[:2], *place[3:])


def _drop_unknown_roles(data: dict[str, Any], source: Source, draft: Draft) -> None:
    """A further role without a function or `head` is a misspelt one."""
    roles = data.get("roles")
    if not isinstance(roles, dict):
        return
    for name in [*roles]:
        known = further_role_section(roles[name]) is not None
        if name not in RolesSection.model_fields and roles[name] is None:
            del roles[name]  # null takes a role away, as it does one that the schema names
        elif name not in RolesSection.model_fields and not known:
            fix = (
                f"{ROLES.advice(name)}. A reward role has the key `function`, "
                "a further model the key `head`"
            )
            where = source.origin(("roles", name))
            draft.faults.append(Fault(where, f"unknown role '{name}'", fix))
            draft.untrusted.add(("roles", name))
            del roles[name]


def _repaired(
    data: dict[str, Any], details: Iterable[ErrorDetails], untrusted: set[KeyPath]
) -> Recipe | None:
    """The recipe with faulty values replaced; notes which ones."""
    for detail in details:
        path = _replaceable(detail["loc"], data)
        section = _descend(data, path[:-1])
        if not isinstance(section, dict):
            continue
        untrusted.add(path)
        section.pop(path[-1], None)
        info = _field_info(path, data)
        if info is not None and info.is_required():
            section[path[-1]] = copy.deepcopy((info.examples or [None])[0])
    try:
        return Recipe.model_validate(data)
    except ValidationError:
        return None  # its faults are reported already; there is just nothing more to check


def _replaceable(path: KeyPath, data: Any) -> KeyPath:
    """The part of an error's place that the schema declares, or the unknown key itself."""
    for depth in range(1, len(path)):
        if _section_at(path[:depth], data) is None and not _holds_sections(path[:depth], data):
            return path[:depth]
    return path


def _holds_sections(path: KeyPath, data: Any) -> bool:
    """Whether a key holds sections under free names."""
    info = _field_info(path, data)
    kinds = [] if info is None else [info.annotation, *get_args(info.annotation)]
    return any(_is_section(_of_mapping(kind)) for kind in kinds)


def _descend(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _section_at(path: KeyPath, data: Any) -> type[Section] | None:
    """The section that a key path of ``data`` leads to, None when it leads to a value."""
    section: type[Section] = Recipe
    keys = iter(enumerate(path, start=1))
    for depth, key in keys:
        info = section.model_fields.get(str(key))
        if info is None or (section is RolesSection and key == "reward"):
            if section is not RolesSection:
                return None
            section = further_role_section(_descend(data, path[:depth])) or RewardSection
            continue
        kinds = [info.annotation, *get_args(info.annotation)]
        found = [kind for kind in kinds if _is_section(kind)]
        named = [kind for kind in map(_of_mapping, kinds) if _is_section(kind)]
        if named and next(keys, None) is not None:
            found = named
        if not found:
            return None
        section = found[0]
    return section


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _sections(kind: Any) -> list[type[Section]]:
    """The sections that an annotation allows."""
    if _is_section(kind):
        return [kind]
    return [found for inner in get_args(kind) for found in _sections(inner)]


def _of_mapping(kind: Any) -> Any:
    """What a mapping of free names holds."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return get_args(kind)[1] if get_origin(kind) is dict else None


def _field_info(path: KeyPath, data: Any) -> FieldInfo | None:
    section = _section_at(path[:-1], data)
    return section.model_fields.get(str(path[-1])) if section else None


def _translate(detail: ErrorDetails, source: Source) -> Fault:
    """One error of pydantic in the words of the recipe."""
    path = detail["loc"]
    dotted, key, where = ".".join(map(str, path)), str(path[-1]), source.origin(path)
    info = _field_info(_replaceable(path, source.data), source.data)
    section = _section_at(path[:-1], source.data)
    if detail["type"] == "missing":
        return Fault(where, f"`{dotted}` is missing", f"add {_example(key, info)}")
    if detail["type"] == "extra_forbidden":
        valid = section.model_fields if section else ()
        return Fault(where, f"unknown key '{key}' (`{dotted}`)", hint(key, valid))
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, Wrong):
        return Fault(where, f"`{dotted}` {error}", error.fix)
    rule = re.sub(r"^\w+ should", "must", detail["msg"])
    example = _example(key, info)
    if detail["type"] == "model_type":
        rule = "must be a mapping"
        if info is None and (kind := _section_at(path, source.data)) is not None:
            example = f"`{key}: {flow_yaml(_examples(kind))}`"
    return Fault(
        where, f"`{dotted}` {rule}, not {detail['input']!r}", f"write for instance {example}"
    )


def _example(key: str, info: FieldInfo | None) -> str:
    if info is None:
        return f"`{key}`"
    value = info.examples[0] if info.examples else info.get_default(call_default_factory=True)
    if isinstance(value, Section):
        value = value.model_dump()
    if value is None and (kinds := _sections(info.annotation)):
        value = _examples(kinds[0])
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    if isinstance(value, (dict, list)):
        text = flow_yaml(value)
    return f"`{key}: {text}` ({info.description})"


def _examples(section: type[Section]) -> dict[str, Any]:
    """What a section needs, by example."""
    fields = section.model_fields.items()
    return {name: field.examples[0] for name, field in fields if field.examples}
