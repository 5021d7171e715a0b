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
    pools = {pool.name: pool for role in models if (pool := plan.pool_of(role)) is not None}
    if len(pools) > 1 or len(set(plan.layouts.values())) > 1:
        raise ValueError(
            "under torchrun all models share the ranks and their layout: give each `colocate: "
            f"actor` and no `parallel` of its own; the pools are {', '.join(pools)}"
        )
    ranks = next(iter(plan.layouts.values())).world
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
