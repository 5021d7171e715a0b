"""A reward of the user's own, found and held against the recipe without importing it."""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from hybridflow.recipe.catalogue import REWARDS
from hybridflow.recipe.checks.context import Context
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.names import hint
from hybridflow.recipe.schema_rewards import FunctionSection

_ARGUMENTS = ("prompt", "response", "answer", "row")


def own_reward_faults(context: Context, key: str, part: FunctionSection) -> Iterator[Fault]:
    """Of a reward that is named as ``file.py:fn`` or ``pkg.mod.fn``."""
    if ":" in part.function:
        file, _, function = part.function.rpartition(":")
        yield from _file_faults(context, key, part, Path(file).expanduser(), function)
    else:
        yield from _module_faults(context, key, part)


def _module_faults(context: Context, key: str, part: FunctionSection) -> Iterator[Fault]:
    """Look a module up on the path; importing it could load anything."""
    module, _, name = part.function.rpartition(".")
    search, file = sys.path, None
    for step in module.split("."):
        spec = PathFinder.find_spec(step, search) if search is not None else None
        if spec is None:
            what = f"there is no module '{module}' for the reward '{part.function}'"
            fix = f"{REWARDS.advice(part.function)}. Install the module, or give 'file.py:fn'"
            yield context.fault(f"{key}.function", what, fix)
            return
        file = spec.origin
        locations = spec.submodule_search_locations
        search = list(locations) if locations is not None else None
    if file is not None and file.endswith(".py"):
        yield from _file_faults(context, key, part, Path(file), name)


def _file_faults(
    context: Context, key: str, part: FunctionSection, file: Path, name: str
) -> Iterator[Fault]:
    where = f"{key}.function"
    if not file.is_file():
        yield context.fault(where, f"there is no file {file}", "mend the path of the reward")
        return
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"{file}:{line}" if line else str(file)
        yield Fault(place, f"not valid Python: {error}", "mend the reward's file")
        return
    names = _defined_names(tree)
    if name not in names:
        yield context.fault(where, f"{file} has no '{name}'", hint(name, names))
        return
    function = _plain_function(tree, name)
    if function is not None:
        yield from _signature_faults(context, key, part, function)


def _plain_function(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """A function that the module defines once and does not decorate, so that its text is its
    signature."""
    found = [
        statement
        for statement in tree.body
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and statement.name == name
    ]
    only = found[0] if len(found) == 1 else None
    if isinstance(only, ast.ClassDef) or only is None or only.decorator_list:
        return None
    return only


def _signature_faults(
    context: Context,
    key: str,
    part: FunctionSection,
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[Fault]:
    told = function.args
    positional = [argument.arg for argument in (*told.posonlyargs, *told.args)]
    given = len(_ARGUMENTS)
    if len(positional) < given and told.vararg is None:
        what = f"{function.name} takes {len(positional)} arguments, not ({', '.join(_ARGUMENTS)})"
        fix = f"a reward takes ({', '.join(_ARGUMENTS)}), then its parameters"
        yield context.fault(f"{key}.function", what, fix)
        return
    settable = [
        *positional[max(given, len(told.posonlyargs)) :],
        *(argument.arg for argument in told.kwonlyargs),
    ]
    for name in part.parameters:
        if name not in settable and told.kwarg is None:
            what = f"the reward '{part.function}' has no parameter '{name}'"
            yield context.fault(f"{key}.parameters.{name}", what, hint(name, settable))
    optional = positional[len(positional) - len(told.defaults) :]
    optional += [
        argument.arg
        for argument, default in zip(told.kwonlyargs, told.kw_defaults, strict=True)
        if default is not None
    ]
    for name in settable:
        if name not in optional and name not in part.parameters:
            what = f"the reward '{part.function}' needs the parameter '{name}'"
            yield context.fault(key, what, f"add `parameters: {{{name}: ...}}`")


def _defined_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for statement in ast.walk(tree):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
            names.add(statement.id)
        elif isinstance(statement, ast.alias):
            names.add(statement.asname or statement.name.partition(".")[0])
    return names
