"""Divisibility of the batch, room in a micro-batch, schedules and devices."""

from collections.abc import Iterator

from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.compile import Stage
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.placement import engine_slots, packed


def batch_faults(context: Context) -> Iterator[Fault]:
    """Prompts over data-parallel ranks, and a rank's prompts over mini-batches."""
    dp = context.recipe.roles.actor.parallel.dp
    for stage in context.stages:
        key = _key(stage, "prompts_per_step", "data.prompts_per_step")
        prompts = stage.prompts_per_step
        if prompts % dp:
            fix = f"set {key} to a multiple of {dp}, such as {_up(prompts, dp)}"
            what = f"{key}={prompts} does not divide over dp={dp} ranks of the actor"
            yield context.fault(key, what, fix)
        elif prompts // dp % stage.mini_batches:
            what = (
                f"a rank's {prompts // dp} prompts ({key}={prompts} over dp={dp}) do not divide "
                f"into mini_batches={stage.mini_batches}"
            )
            fix = f"make {key} a multiple of {dp * stage.mini_batches}, or lower mini_batches"
            yield context.fault("roles.actor.mini_batches", what, fix)


def reference_batch_faults(context: Context) -> Iterator[Fault]:
    """Prompts over the reference's own data-parallel ranks."""
    layout = context.plan.layouts.get("reference")
    prompts = context.recipe.data.prompts_per_step
    if layout is not None and layout != context.recipe.layout("actor") and prompts % layout.dp:
        what = f"data.prompts_per_step={prompts} does not divide over the reference's {layout.dp}"
        fix = f"set it to a multiple of {layout.dp}, such as {_up(prompts, layout.dp)}"
        yield context.fault("roles.reference.parallel", what, fix)


def _up(value: int, divisor: int) -> int:
    """The smallest multiple of ``divisor`` from ``value`` on."""
    return -(-value // divisor) * divisor


def _key(stage: Stage, key: str, default: str) -> str:
    return ".".join(map(str, (*stage.key, key))) if stage.key else default


def micro_batch_faults(context: Context) -> Iterator[Fault]:
    """A pack must hold the longest sample."""
    recipe = context.recipe
    if recipe.roles.rollout is None:
        return
    prompt, response = recipe.data.max_prompt_tokens, recipe.roles.rollout.sampling.max_tokens
    sections = {"actor": recipe.roles.actor, "reference": recipe.roles.reference}
    for role, section in sections.items():
        if section is not None and section.micro_batch_tokens < prompt + response:
            key = f"roles.{role}.micro_batch_tokens"
            what = (
                f"{key}={section.micro_batch_tokens} cannot hold the longest sample: "
                f"max_prompt_tokens {prompt} + max_tokens {response}"
            )
            yield context.fault(key, what, f"set it to at least {prompt + response}")


def schedule_faults(context: Context) -> Iterator[Fault]:
    """Learning rates that could not follow their schedule."""
    for stage in context.stages:
        prefix = "warm_start" if stage.name == "warm_start" else "roles.actor.optimizer"
        optimizer = stage.optimizer
        taken = stage.optimizer_steps
        if taken and optimizer.schedule != "constant" and optimizer.warmup_steps >= taken:
            what = (
                f"{prefix}.warmup_steps={optimizer.warmup_steps} leaves nothing of the stage's "
                f"{taken} optimizer steps for the schedule"
            )
            yield context.fault(f"{prefix}.warmup_steps", what, "lower it")
        if optimizer.min_lr > optimizer.lr:
            what = f"{prefix}.min_lr={optimizer.min_lr} is above lr={optimizer.lr}"
            yield context.fault(f"{prefix}.min_lr", what, "lower it")


def device_faults(context: Context) -> Iterator[Fault]:
    """More devices asked for than the cluster has; guests larger than their host."""
    plan, cluster = context.plan, context.recipe.cluster
    available = cluster.nodes * cluster.devices_per_node
    if plan.devices > available:
        parts = " + ".join(f"{pool.name} {pool.devices}" for pool in plan.pools.values())
        what = (
            f"the roles need {plan.devices} devices ({parts}), but nodes={cluster.nodes} x "
            f"devices_per_node={cluster.devices_per_node} gives {available}"
        )
        fix = "raise cluster.devices_per_node, lower the layouts, or set `colocate: actor`"
        yield context.fault("cluster", what, fix)
    for pool in plan.pools.values():
        host = plan.layouts.get(pool.name)
        if host is not None and pool.devices > host.world:
            what = (
                f"roles colocated with '{pool.name}' need {pool.devices} devices, but it has "
                f"{host.world}"
            )
            yield context.fault(f"roles.{pool.name}.parallel", what, "make them no larger")


def server_device_faults(context: Context) -> Iterator[Fault]:
    """Servers whose ranks would not be on one node."""
    plan, cluster = context.plan, context.recipe.cluster
    pool = plan.pool_of("rollout")
    if pool is None or plan.devices > cluster.nodes * cluster.devices_per_node:
        return
    parallel = context.recipe.roles.servers.parallel
    pools = packed(
        (p.devices for p in plan.pools.values()), cluster.nodes, cluster.devices_per_node
    )
    places = dict(zip(plan.pools, pools, strict=True))[pool.name]
    hosts = [host for host, _ in places]
    try:
        engine_slots(hosts, parallel.tp, parallel.dp, plan.trainer_beside_rollout)
    except ValueError as error:
        what, _, fix = str(error).partition(": ")
        yield context.fault("roles.rollout.parallel", what, fix)


BATCH = (
    *("data.prompts_per_step", "data.samples_per_prompt", "roles.actor.parallel"),
    *("roles.actor.mini_batches", "roles.actor.epochs", "warm_start"),
)
SCHEDULE = (
    *("steps", "roles.actor.optimizer", "roles.actor.mini_batches", "roles.actor.epochs"),
    *("warm_start", "dataflow"),
)
DEVICES = (
    *("cluster", "dataflow", "warm_start.dataflow", "roles.reference"),
    *("roles.actor.parallel", "roles.rollout.parallel", "roles.rollout.colocate"),
)
LENGTHS = ("data.max_prompt_tokens", "roles.rollout.sampling.max_tokens")

CHECKS = (
    Check(BATCH, batch_faults),
    Check(("data.prompts_per_step", "roles.reference", "dataflow"), reference_batch_faults),
    Check((*LENGTHS, "roles.actor.micro_batch_tokens", "roles.reference"), micro_batch_faults),
    Check(SCHEDULE, schedule_faults),
    Check(DEVICES, device_faults),
    Check(DEVICES, server_device_faults),
)
