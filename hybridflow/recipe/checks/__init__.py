"""Everything that is wrong with a recipe, without torch, Ray or a server.

``check_file`` is what ``hybridflow check`` runs; ``check`` takes a recipe that loaded.
"""

from collections.abc import Sequence
from pathlib import Path

from hybridflow.recipe.checks import data, dataflow, model, roles, sizes
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.load import read_draft
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.source import KeyPath

CHECKS: tuple[Check, ...] = (
    *dataflow.CHECKS,
    *model.CHECKS,
    *data.CHECKS,
    *sizes.CHECKS,
    *roles.CHECKS,
)


def check(recipe: Recipe, untrusted: frozenset[KeyPath] = frozenset()) -> list[Fault]:
    """Every fault of a recipe, sorted by place; checks that read an ``untrusted`` key are left out."""
    context = Context(recipe)
    faults = [
        fault
        for check in CHECKS
        if not any(_touches(key, bad) for key in check.reads for bad in untrusted)
        for fault in check.find(context)
    ]
    return sorted(dict.fromkeys(faults), key=_place)


def check_file(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[Recipe | None, list[Fault]]:
    """The recipe as far as it can be read, and every fault: form, graph, files and sizes."""
    draft = read_draft(path, overrides)
    if draft.recipe is None:
        return None, draft.faults
    found = check(draft.recipe, frozenset(draft.untrusted))
    return draft.recipe, sorted([*draft.faults, *found], key=_place)


def _touches(key: str, bad: KeyPath) -> bool:
    """Whether one of the two keys holds the other."""
    path = tuple(key.split("."))
    shared = min(len(path), len(bad))
    return path[:shared] == bad[:shared]


def _place(fault: Fault) -> tuple[str, int]:
    file, _, line = fault.where.rpartition(":")
    return (file, int(line)) if line.isdigit() else (fault.where, 0)
