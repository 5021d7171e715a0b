"""Divisibility of the batch, room in a micro-batch, schedules and devices."""

from collections.abc import Iterator

from hybridflow.recipe.checks.context import Check, Context
from hybridflow.recipe.faults import Fault
from hybridflow.recipe.placement import engine_slots, packed
from hybridflow.recipe.plan import ACTOR, Stage


def batch_faults(context: Context) -> Iterator[Fault]:
    """Prompts over data-parallel ranks, and a rank's prompts over mini-batches."""
    for stage in context.stages:
        key = _key(stage, "prompts_per_step", "data.prompts_per_step")
        prompts = stage.prompts_per_step
        acting = dict.fromkeys(role for node in stage.graph.nodes for role in node.roles)
        reported: set[int] = set()
        for role in (role for role in acting if role in context.models):
            dp = context.recipe.layout(role).dp
            training = stage.trained.get(role)
            mini_batches = 1 if training is None else training.mini_batches
            if prompts % dp and dp not in reported:
                reported.add(dp)
                fix = f"set {key} to a multiple of {dp}, such as {_multiples(prompts, dp)}"
                what = f"{key}={prompts} does not divide over dp={dp} ranks of the {role}"
                yield context.fault(key, what, fix)
            elif prompts % dp == 0 and prompts // dp % mini_batches:
                what = (
                    f"a rank's {prompts // dp} prompts ({key}={prompts} over dp={dp}) do not "
                    f"divide into mini_batches={mini_batches}"
                )
                fix = f"make {key} a multiple of {dp * mini_batches}, or lower mini_batches"
                yield context.fault(f"roles.{role}.mini_batches", what, fix)


def _multiples(value: int, divisor: int) -> str:
    """Those of ``divisor`` below and above ``value``."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def _key(stage: Stage, key: str, default: str) -> str:
    return ".".join(map(str, (*stage.key, key))) if stage.key else default


def micro_batch_faults(context: Context) -> Iterator[Fault]:
    """A pack must hold the longest sample."""
    recipe = context.recipe
    if recipe.roles.rollout is None:
        return
    prompt, response = recipe.data.max_prompt_tokens, recipe.roles.rollout.sampling.max_tokens
    for role, section in context.models.items():
        if section.micro_batch_tokens < prompt + response:
            key = f"roles.{role}.micro_batch_tokens"
            what = (
                f"{key}={section.micro_batch_tokens} cannot hold the longest sample: "
                f"max_prompt_tokens {prompt} + max_tokens {response}"
            )
            yield context.fault(key, what, f"set it to at least {prompt + response}")


def schedule_faults(context: Context) -> Iterator[Fault]:
    """Learning rates that could not follow their schedule."""
    for stage, role in [(one, role) for one in context.stages for role in one.trained]:
        warm = stage.name == "warm_start" and role == ACTOR
        prefix = "warm_start" if warm else f"roles.{role}.optimizer"
        optimizer = stage.trained[role].optimizer
        taken = context.plan.scheduled_steps(stage, role)
        if taken and optimizer.schedule != "constant" and optimizer.warmup_steps >= taken:
            what = (
                f"{prefix}.warmup_steps={optimizer.warmup_steps} leaves nothing of the stage's "
                f"{taken} optimizer steps for the schedule"
            )
            yield context.fault(f"{prefix}.warmup_steps", what, "lower it")
        if optimizer.min_lr > optimizer.lr and optimizer.schedule != "constant":
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


MODELS = ("roles.actor.parallel", "roles.reference", "roles.critic")
BATCH = (
    *("data.prompts_per_step", "data.samples_per_prompt", "dataflow", "warm_start"),
    *("roles.actor.mini_batches", "roles.actor.epochs", *MODELS),
)
SCHEDULE = (
    *("steps", "roles.actor.optimizer", "roles.actor.mini_batches", "roles.actor.epochs"),
    *("warm_start", "dataflow", "algorithm.critic_warmup_steps", *MODELS[1:]),
)
DEVICES = (
    *("cluster", "dataflow", "warm_start.dataflow", *MODELS),
    *("roles.rollout.parallel", "roles.rollout.colocate"),
)
LENGTHS = ("data.max_prompt_tokens", "roles.rollout.sampling.max_tokens")

CHECKS = (
    Check(BATCH, batch_faults),
    Check((*LENGTHS, "roles.actor.micro_batch_tokens", *MODELS[1:]), micro_batch_faults),
    Check(SCHEDULE, schedule_faults),
    Check(DEVICES, device_faults),
    Check(DEVICES, server_device_faults),
)
