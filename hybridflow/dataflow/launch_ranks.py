"""A run under torchrun: every rank runs the same loop; rank 0 keeps the run's folder."""

from __future__ import annotations

import io
import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from hybridflow.cluster import RanksSession, RanksStore
from hybridflow.data import load_tokenizer
from hybridflow.dataflow.launch import LaunchOptions, make_feeds, train
from hybridflow.dataflow.live_values import live_values
from hybridflow.dataflow.run_folder import Checkpoint, Progress, RunFolder
from hybridflow.dataflow.runner import SerialRunner
from hybridflow.dataflow.signals import orderly_end
from hybridflow.dataflow.state import SharedState
from hybridflow.dataflow.team import Team
from hybridflow.dataflow.trainer import Records, Trainer
from hybridflow.monitor import Console, RunWriter
from hybridflow.recipe.compile import Plan
from hybridflow.recipe.signature import MEGATRON_KINDS
from hybridflow.workers.job_group import join

_OPENED = "where the run goes on from"


def check_plan(plan: Plan, world: int) -> None:
    """ValueError when a plan cannot run on ``world`` ranks of torchrun without Ray."""
    kinds = plan.recipe.roles.kinds()
    if others := [role for role in plan.roles if kinds[role] not in MEGATRON_KINDS]:
        raise ValueError(
            f"torchrun runs dataflows of models alone, and this one acts on {', '.join(others)}; "
            "run it with Ray: `hybridflow train RECIPE` without torchrun, on several machines with "
            "launch/torchrun.sh"
        )
    if len(plan.pools) > 1 or len(set(plan.layouts.values())) > 1:
        raise ValueError(
            "under torchrun all roles share the ranks and their layout: give each `colocate: "
            f"actor` and no `parallel` of its own; the pools are {', '.join(plan.pools)}"
        )
    if plan.devices != world:
        raise ValueError(
            f"the recipe's layout has {plan.devices} ranks, torchrun has started {world}; set "
            f"--nproc-per-node and --nnodes to {plan.devices} ranks together, or "
            "roles.actor.parallel to fit"
        )
    if plan.recipe.control is not None:
        raise ValueError(
            "control: under torchrun there is no driver to change live values of; remove `control`"
        )


def train_on_ranks(plan: Plan, store: RanksStore, options: LaunchOptions) -> None:
    """Run the plan on all ranks of the job; each calls this.

    Raises:
        ValueError: the plan needs more than model roles, or other ranks than there are.
    """
    check_plan(plan, store.world)
    if store.rank != 0:
        _follow(plan, store)
        return

    def opened(resume: Checkpoint | None) -> None:
        told = None if resume is None else [str(resume.folder), asdict(resume.progress)]
        store.tell(_OPENED, json.dumps(told))

    train(plan, lambda logs: RanksSession(store, join), options, SerialRunner(), opened)


def _follow(plan: Plan, store: RanksStore) -> None:
    """What every rank but the first does: the same steps; what they leave is rank 0's to keep."""
    with ExitStack() as stack:
        stack.enter_context(orderly_end())
        tokenizer = load_tokenizer(plan.recipe.model.path)
        feeds = make_feeds(plan, tokenizer)
        resume = _checkpoint(json.loads(store.hear(_OPENED)))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridflow-rank-"))
        writer = stack.enter_context(RunWriter(scratch))
        console = Console(plan.recipe.name, file=io.StringIO(), live=False)
        records = Records(writer, stack.enter_context(console))
        folder = _SharedFolder(Path(plan.recipe.folder))
        session = stack.enter_context(RanksSession(store, join))
        state = SharedState(live_values(plan))
        told = (records.fleet_event, folder.note_version)
        team = Team(plan, session, plan.stages[0], *told, state)
        stack.callback(team.close)
        decode = tokenizer.batch_decode
        Trainer(plan, team, feeds, folder, records, SerialRunner(), decode).run(resume)


def _checkpoint(told: list | None) -> Checkpoint | None:
    return None if told is None else Checkpoint(Path(told[0]), Progress(**told[1]))


class _SharedFolder(RunFolder):
    """The run's folder as ranks see it that do not keep it."""

    def begin_checkpoint(self, progress: Progress) -> Path:
        """Where the engines write; rank 0 makes it before they do."""
        return self.partial(progress)

    def finish_checkpoint(self, partial: Path, progress: Progress, keep: int) -> Path:
        """Rank 0 does."""
        return partial.with_suffix("")

    def note_version(self, version: int) -> None:
        """Rank 0 does; nothing is published under torchrun."""
