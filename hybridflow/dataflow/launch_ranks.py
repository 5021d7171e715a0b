"""A run under torchrun, without Ray: rank 0 drives, every rank holds its part of the models."""

from __future__ import annotations

from hybridflow.cluster import RanksSession, RanksStore, serve
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.dataflow.signals import orderly_end
from hybridflow.recipe.plan import Plan
from hybridflow.recipe.signature import MEGATRON_KINDS
from hybridflow.workers.job_group import join


def check_plan(plan: Plan, world: int) -> None:
    """ValueError when a plan cannot run on ``world`` ranks of torchrun without Ray."""
    kinds = plan.recipe.roles.kinds()
    models = [role for role in plan.roles if kinds[role] in MEGATRON_KINDS]
    first = models[0]
    places = {role: (plan.pool_of(role), plan.layouts[role]) for role in models}
    if apart := [role for role in models if places[role] != places[first]]:
        raise ValueError(
            "under torchrun all models share the ranks and their layout, and "
            f"{', '.join(apart)} would have others than the {first}: give each `colocate: {first}` "
            f"and no `parallel` but the {first}'s"
        )
    ranks = plan.layouts[first].world
    if ranks != world:
        raise ValueError(
            f"the recipe's layout has {ranks} ranks, torchrun has started {world}; set "
            f"--nproc-per-node and --nnodes to {ranks} ranks together, or "
            "roles.actor.parallel to fit"
        )


def train_on_ranks(plan: Plan, store: RanksStore, options: LaunchOptions) -> None:
    """Run the plan on all ranks of the job; each calls this.

    Raises:
        ValueError: the plan needs other ranks than there are.
        ConnectionError: on the other ranks, when rank 0 is gone.
    """
    check_plan(plan, store.world)
    if store.rank == 0:
        train(plan, lambda logs: RanksSession(store, join), options)
        return
    with orderly_end():
        serve(store, join)
