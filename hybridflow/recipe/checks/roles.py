"""SGLang's interpreter, and what a rollout's servers can do."""

import os
from collections.abc import Iterator
from pathlib import Path

from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.faults import Fault

SGLANG_PYTHON = ".venv-sglang/bin/python"


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
    Check(("roles.rollout.parallel",), expert_faults),
    Check(("roles.rollout.engine", "roles.rollout.python"), server_faults),
)
