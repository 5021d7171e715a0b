"""Everything that is wrong with a recipe, without torch, Ray or a server.

``check_file`` is what ``hybridflow check`` runs; ``check`` takes a recipe that loaded.
"""

from collections.abc import Sequence
from pathlib import Path

from hybridflow.recipe.checks import (
    algorithm,
    control,
    data,
    dataflow,
    idle,
    mismatch,
    model,
    models,
    output,
    provenance,
    rewards,
    roles,
    served,
    sizes,
    sync,
    token_rewards,
    untaught,
)
from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.load import read_draft
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.source import KeyPath

CHECKS: tuple[Check, ...] = (
    *dataflow.CHECKS,
    *idle.CHECKS,
    *algorithm.CHECKS,
    *mismatch.CHECKS,
    *provenance.CHECKS,
    *untaught.CHECKS,
    *model.CHECKS,
    *models.CHECKS,
    *served.CHECKS,
    *data.CHECKS,
    *sizes.CHECKS,
    *roles.CHECKS,
    *sync.CHECKS,
    *rewards.CHECKS,
    *token_rewards.CHECKS,
    *output.CHECKS,
    *control.CHECKS,
)


def check(recipe: Recipe, untrusted: frozenset[KeyPath] = frozenset()) -> list[Fault]:
    """Every fault of a recipe, sorted by place.

    Args:
        untrusted: keys that do not hold the user's value; checks that read one are left out.
    """
    context = Context(recipe, untrusted)
    faults = [
        fault
        for check in CHECKS
        if all(context.trusts(key) for key in check.reads)
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


def _place(fault: Fault) -> tuple[str, int]:
    file, _, line = fault.where.rpartition(":")
    return (file, int(line)) if line.isdigit() else (fault.where, 0)
