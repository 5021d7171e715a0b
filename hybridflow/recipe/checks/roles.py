"""Rewards that can be found without importing them, SGLang's interpreter, the sync folder."""

import ast
import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from hybridflow.recipe.catalogue import REWARDS
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.names import advice, hint
from hybridflow.recipe.schema_roles import RewardSection

SGLANG_PYTHON = ".venv-sglang/bin/python"


def reward_faults(context: Context) -> Iterator[Fault]:
    """Unknown reward functions, and parameters that a shipped one does not take."""
    for role, section in context.recipe.roles.rewards().items():
        if not context.trusts(f"roles.{role}"):
            continue
        key = f"roles.{role}.function"
        if section.function in REWARDS:
            yield from _parameter_faults(context, role, section)
        elif ":" in section.function:
            file, _, name = section.function.rpartition(":")
            yield from _function_faults(context, key, Path(file).expanduser(), name)
        elif "." in section.function:
            yield from _module_faults(context, key, section.function)
        else:
            what = f"unknown reward '{section.function}'"
            fix = f"{REWARDS.advice(section.function)}. Your own is 'pkg.mod.fn' or 'file.py:fn'"
            yield context.fault(key, what, fix)


def _parameter_faults(context: Context, role: str, section: RewardSection) -> Iterator[Fault]:
    known = REWARDS[section.function].parameters
    key = f"roles.{role}.parameters"
    for name, value in section.parameters.items():
        if name not in known:
            what = f"the reward '{section.function}' has no parameter '{name}'"
            yield context.fault(f"{key}.{name}", what, hint(name, known))
        elif problem := known[name].problem(value):
            fix = f"{name}: {known[name].description}"
            yield context.fault(f"{key}.{name}", f"`{key}.{name}` {problem}", fix)
    for name, option in known.items():
        if option.required and name not in section.parameters:
            what = f"the reward '{section.function}' needs the parameter '{name}'"
            fix = f"add `parameters: {{{name}: ...}}` ({option.description})"
            yield context.fault(f"roles.{role}", what, fix)


def _module_faults(context: Context, key: str, function: str) -> Iterator[Fault]:
    """Look a module up on the path; importing it could load anything."""
    module, _, name = function.rpartition(".")
    search, file = sys.path, None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, search) if search is not None else None
        if spec is None:
            what = f"there is no module '{module}' for the reward '{function}'"
            fix = f"{advice(function, REWARDS)} Install the module, or give 'file.py:fn'"
            yield context.fault(key, what, fix)
            return
        file = spec.origin
        locations = spec.submodule_search_locations
        search = list(locations) if locations is not None else None
    if file is not None and file.endswith(".py"):
        yield from _function_faults(context, key, Path(file), name)


def _function_faults(context: Context, key: str, file: Path, name: str) -> Iterator[Fault]:
    if not file.is_file():
        yield context.fault(key, f"there is no file {file}", "mend the path of the reward")
        return
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{file}:{line}" if line else str(file)
        yield Fault(where, f"not valid Python: {error}", "mend the reward's file")
        return
    names = _top_level_names(tree)
    if name not in names:
        yield context.fault(key, f"{file} has no '{name}'", hint(name, names))


def _top_level_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for statement in ast.walk(tree):
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names.add(statement.name)
        elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
            names.add(statement.id)
        elif isinstance(statement, ast.alias):
            names.add(statement.asname or statement.name.partition(".")[0])
    return names


def server_faults(context: Context) -> Iterator[Fault]:
    """SGLang without its interpreter."""
    rollout = context.recipe.roles.rollout
    if rollout is None:
        return
    python = Path(rollout.python or SGLANG_PYTHON)
    if rollout.engine == "sglang" and not (python.is_file() and os.access(python, os.X_OK)):
        what = f"there is no interpreter {python} to run SGLang with"
        key = "roles.rollout.python" if rollout.python else "roles.rollout.engine"
        yield context.fault(key, what, "run `make sglang`, or set roles.rollout.python")


def sync_faults(context: Context) -> Iterator[Fault]:
    """A folder for weights that cannot be written."""
    rollout = context.recipe.roles.rollout
    if rollout is None:
        return
    directory = Path(rollout.sync.directory)
    if not (directory.is_dir() and os.access(directory, os.W_OK)):
        what = f"{directory} is no folder that can be written, so weights cannot be published"
        yield context.fault("roles.rollout.sync.directory", what, "make it, or choose another")


def transport_faults(context: Context) -> Iterator[Fault]:
    """Ways of publishing that do not go together."""
    rollout = context.recipe.roles.rollout
    if rollout is None:
        return
    sync = rollout.sync
    if sync.transport == "broadcast" and rollout.engine != "sglang":
        what = "broadcast is SGLang's own way of taking weights; the local engine has none"
        yield context.fault("roles.rollout.sync.transport", what, "use `direct` or `disk`")
    if sync.mode == "bucketed" and sync.transport != "direct":
        what = f"mode: bucketed is a way of `direct`; `{sync.transport}` has no modes"
        yield context.fault("roles.rollout.sync.mode", what, "remove it, or use transport: direct")
    if sync.full_every is not None and sync.transport != "disk":
        what = f"full_every counts versions on disk; `{sync.transport}` writes none"
        fix = "remove it, or use transport: disk"
        yield context.fault("roles.rollout.sync.full_every", what, fix)
    memory = Path(sync.directory).resolve().is_relative_to("/dev/shm")
    if sync.transport == "disk" and memory and context.recipe.cluster.nodes > 1:
        what = f"{sync.directory} is the memory of one machine; the other nodes would not see it"
        fix = "name a folder of a file system that all nodes share, or use transport: direct"
        yield context.fault("roles.rollout.sync.directory", what, fix)
    if sync.pause == "in_place" and sync.transport != "direct":
        what = f"pause: in_place keeps caches, which servers drop that load over `{sync.transport}`"
        fix = "use retract, or transport: direct"
        yield context.fault("roles.rollout.sync.pause", what, fix)
    elif sync.pause == "in_place" and rollout.max_staleness == 0:
        what = (
            "pause: in_place goes on with a cache of older weights, which max_staleness 0 excludes"
        )
        fix = "use retract, or allow roles.rollout.max_staleness of 1 or more"
        yield context.fault("roles.rollout.sync.pause", what, fix)


def expert_faults(context: Context) -> Iterator[Fault]:
    """Experts of a server spread over groups that its devices do not form."""
    rollout = context.recipe.roles.rollout
    if rollout is None:
        return
    tp, ep = rollout.parallel.tp, rollout.parallel.ep
    if tp % ep:
        what = f"roles.rollout: ep={ep} does not divide tp={tp}"
        fix = f"choose ep from {[n for n in range(1, tp + 1) if tp % n == 0]}"
        yield context.fault("roles.rollout.parallel.ep", what, fix)


CHECKS = (
    Check((), reward_faults),
    Check(("roles.rollout",), transport_faults),
    Check(("roles.rollout.parallel",), expert_faults),
    Check(("roles.rollout.engine", "roles.rollout.python"), server_faults),
    Check(("roles.rollout.sync",), sync_faults),
)
