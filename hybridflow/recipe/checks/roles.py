"""SGLang's interpreter, the sync folder, and what a rollout's servers can do."""

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
    Check(("roles.rollout",), transport_faults),
    Check(("roles.rollout.parallel",), expert_faults),
    Check(("roles.rollout.engine", "roles.rollout.python"), server_faults),
    Check(("roles.rollout.sync",), sync_faults),
)
