"""Writes docs/reference/ from the schema and the catalogue: python docs/generate_reference.py

A test fails when the files are not what this program would write.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from hybridflow.recipe import catalogue
from hybridflow.recipe.graph_load import NODE_KEYS
from hybridflow.recipe.registry import Registry
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.schema_roles import FurtherModelSection, RewardSection, RolesSection
from hybridflow.recipe.section import Section
from hybridflow.recipe.signature import Option, Signature
from hybridflow.recipe.source import to_yaml

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate_reference.py; change the schema or the catalogue instead. -->"


def recipe_reference() -> str:
    """Every key of a recipe, one table per section."""
    lines = ["# Keys of a recipe", "", NOTE, "", *_section("", Recipe)]
    return "\n".join(lines) + "\n"


def _section(path: str, section: type[Section]) -> Iterator[str]:
    yield f"## `{path}`" if path else "## Top level"
    yield ""
    yield (section.__doc__ or "").strip().splitlines()[0]
    yield ""
    yield "| Key | Value | Default | Meaning |"
    yield "|---|---|---|---|"
    inner = []
    for name, info in section.model_fields.items():
        key = f"{path}.{name}" if path else name
        nested = _nested(info)
        if nested is not None:
            inner.append((key, nested))
        yield f"| `{name}` | {_kind(info, nested)} | {_default(info)} | {info.description} |"
    if section is RolesSection:
        yield "| any other name | as `roles.reward` | | with `function`: a further reward role |"
        yield "| any other name | as `roles.NAME` below | | with `head`: a further model |"
    yield ""
    for key, nested in inner:
        yield from _section(key, nested)
    if section is RolesSection:
        yield from _section("roles.NAME", FurtherModelSection)
    if section is RewardSection:
        yield from _rewards()


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types of a union, without what is annotated to them; a mapping is a leaf."""
    if get_origin(annotation) is Annotated:
        yield from _leaves(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for kind in get_args(annotation):
            yield from _leaves(kind)
    else:
        yield annotation


def _nested(info: FieldInfo) -> type[Section] | None:
    kinds = [*_leaves(info.annotation)]
    found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    return found[0] if found else None


_RULES = {
    "_clip": "number in (0, 1), or [low, high] with low in (0, 1)",
    "_betas": "two numbers in [0, 1)",
    "_on_error": "`fail`, `group_mean` or {value: number}",
}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _kind(info: FieldInfo, nested: type[Section] | None) -> str:
    """What a value may be; a rule of ranges.py by its own words."""
    if nested is not None:
        return "section"
    for rule in info.metadata:
        name = getattr(getattr(rule, "func", None), "__name__", "")
        if name in _RULES:
            return _RULES[name]
    bounds = [
        f"{sign} {getattr(rule, word)}"
        for rule in info.metadata
        for word, sign in _SIGNS.items()
        if hasattr(rule, word)
    ]
    return " ".join([_type_text(info.annotation), ", ".join(bounds)]).strip()


def _type_text(annotation: Any) -> str:
    names = {int: "integer", float: "number", str: "text", bool: "true or false", dict: "mapping"}
    if annotation in names:
        return names[annotation]
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Annotated:
        return _type_text(get_args(annotation)[0])
    arguments = get_args(annotation)
    if arguments and all(isinstance(value, str) for value in arguments):
        return " or ".join(f"`{value}`" for value in arguments)
    origin = getattr(annotation, "__origin__", None)
    if origin in (dict, list):
        return "mapping" if origin is dict else "list"
    return " or ".join(
        _type_text(value) for value in arguments if not type(value).__name__.startswith("Field")
    )


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, Section):
        return "its defaults"
    text = value if isinstance(value, list) else to_yaml([value]).removeprefix("- ").strip()
    return f"`{text}`"


def _rewards() -> Iterator[str]:
    yield "### Rewards by name"
    yield ""
    yield "| `function` | Meaning | `parameters` |"
    yield "|---|---|---|"
    for name, entry in catalogue.REWARDS.items():
        told = f"{entry.description}{_aliases(catalogue.REWARDS, name)}"
        yield f"| `{name}` | {told} | {_options(entry.parameters) or 'none'} |"
    yield ""


def dataflow_reference() -> str:
    """Everything that a graph may name."""
    lines = [*_head(), *_inputs(), *_calls(), *_functions(), *_words()]
    return "\n".join(lines) + "\n"


def _head() -> Iterator[str]:
    yield from ("# What a dataflow may name", "", NOTE, "")
    yield f"Keys of a node: {', '.join(f'`{key}`' for key in NODE_KEYS)}, and the options below."
    yield ""


def _inputs() -> Iterator[str]:
    yield from ("## Inputs", "", "| Field | Type | Rows | Meaning |", "|---|---|---|---|")
    for name, entry in catalogue.GRAPH_INPUTS.items():
        yield f"| `{name}` | {entry.type} | {entry.batch} | {entry.type.description} |"
    yield ""


def _calls() -> Iterator[str]:
    kinds = {
        "model": "actor, reference, further models with `head: vocabulary`",
        "value": "critic, further models with `head: value`",
        "rollout": "rollout",
        "reward": "reward roles",
    }
    yield from ("## Calls", "")
    for (kind, name), signature in catalogue.CALLS.items():
        roles = "actor" if name == "publish" else kinds[kind]
        trained = ", where trained" if signature.trainable else ""
        yield f"### `{name}` of {roles}{trained}"
        yield from ("", *_signature(signature))


def _functions() -> Iterator[str]:
    yield from ("## Functions", "")
    for name, signature in catalogue.FUNCTIONS.items():
        yield f"### `{name}`"
        yield ""
        if others := _aliases(catalogue.FUNCTIONS, name):
            yield from (others.removeprefix("; ").capitalize() + ".", "")
        yield from _signature(signature)


def _aliases(registry: Registry[Any], name: str) -> str:
    """``; also `alias```, empty where there is none."""
    others = [f"`{alias}`" for alias, entry in registry.aliases.items() if entry == name]
    return f"; also {', '.join(others)}" if others else ""


def _signature(signature: Signature) -> Iterator[str]:
    yield signature.description
    yield ""
    if signature.inputs or signature.outputs:
        yield from ("| | Name | Type | Meaning |", "|---|---|---|---|")
    for name, given in signature.inputs.items():
        types = " or ".join(map(str, given.types))
        optional = " (optional)" if given.optional else ""
        yield f"| in | `{name}`{optional} | {types} | {given.description} |"
    for name, kind in signature.outputs.items():
        yield f"| out | `{name}` | {kind} | {kind.description} |"
    if options := _options(signature.options):
        yield from ("", f"Options: {options}")
    yield ""


def _options(options: Mapping[str, Option]) -> str:
    return "; ".join(f"`{name}` ({_option(option)})" for name, option in options.items())


def _option(option: Option) -> str:
    values = " or ".join(f"`{choice}`" for choice in option.choices) or option.dtype
    default = "required" if option.required else f"default {option.default}"
    rule = "" if option.rule is None else f", {option.rule.text}"
    return f"{values}{rule}, {default}: {option.description}"


def _words() -> Iterator[str]:
    yield from ("## Losses", "", "| `loss` | Meaning | Needs |", "|---|---|---|")
    for name, loss in {**catalogue.LOSSES, **catalogue.VALUE_LOSSES}.items():
        needs = ", ".join(f"`{parameter}`" for parameter in loss.needs) or "nothing more"
        yield f"| `{name}` | {loss.description}{_aliases(catalogue.LOSSES, name)} | {needs} |"
    for title, registry in (
        ("Values of `algorithm.aggregation`", catalogue.AGGREGATIONS),
        ("Values of `algorithm.kl.estimator`", catalogue.KL_ESTIMATORS),
    ):
        yield from ("", f"## {title}", "", "| Name | Meaning |", "|---|---|")
        for name, text in registry.items():
            yield f"| `{name}` | {text}{_aliases(registry, name)} |"
    yield from ("", "## Conditions of `when`", "", "| Word | True where |", "|---|---|")
    for name, text in catalogue.CONDITIONS.items():
        yield f"| `{name}` | {text} |"
    yield from ("", "## Words of `every`", "", "| Word | Runs |", "|---|---|")
    for name, text in catalogue.SECTIONS.items():
        yield f"| `{name}` | {text} |"


PAGES = {"recipe.md": recipe_reference, "dataflow.md": dataflow_reference}


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
