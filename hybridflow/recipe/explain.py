"""A plan in words: the graph, who runs where, and how samples become optimizer steps."""

from collections.abc import Iterator

from hybridflow.recipe.catalogue import CONDITIONS, SECTIONS
from hybridflow.recipe.graph import Graph, Node
from hybridflow.recipe.plan import ACTOR, Plan, Stage
from megatron_bridge.layout import ParallelLayout


def explain(plan: Plan) -> str:
    """Several paragraphs of plain text; each line fits a wide terminal."""
    lines = [f"{plan.recipe.name}: {plan.recipe.model.path}", "", *_devices(plan)]
    for stage in plan.stages:
        lines += ["", *_stage(plan, stage)]
    return "\n".join(lines)


def _devices(plan: Plan) -> Iterator[str]:
    cluster = plan.recipe.cluster
    available = cluster.nodes * cluster.devices_per_node
    yield f"Devices: {plan.devices} of {available} (a device is a GPU, or a slot on the CPU)"
    for pool in plan.pools.values():
        yield f"  pool {pool.name}: {pool.devices}"
        for role in pool.roles:
            yield f"    {role}: {_placement(plan, role)}"
    kinds = plan.recipe.roles.kinds()
    for role, kind in kinds.items():
        if role not in plan.roles:
            yield f"  {role}: not used by any node, not started"
        elif kind == "reward":
            section = plan.recipe.roles.rewards()[role]
            functions = " + ".join(
                f"{part.weight:g} * {part.function}" if section.functions else part.function
                for _, part in section.parts(role).values()
            )
            yield f"  {role}: {functions}, {section.workers} process(es), no device"


def _placement(plan: Plan, role: str) -> str:
    if role in plan.layouts:
        return "; ".join(_layout(plan.layouts[role]))
    rollout = plan.recipe.roles.servers
    servers = rollout.parallel
    return f"{servers.dp} server(s) of engine {rollout.engine}, {servers.tp} device(s) each"


def _layout(layout: ParallelLayout) -> Iterator[str]:
    yield f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp} = {layout.world} rank(s)"
    if (layout.ep, layout.expert_tp) != (1, layout.tp):
        yield (
            f"experts of a stage: etp {layout.expert_tp} x ep {layout.ep}, "
            f"{layout.expert_dp} replica(s)"
        )
    for place, layers in (("first", layout.first_stage_layers), ("last", layout.last_stage_layers)):
        if layers is not None:
            yield f"{place} stage: {layers} layer(s)"


def _stage(plan: Plan, stage: Stage) -> Iterator[str]:
    yield f"Stage {stage.name}: {stage.steps} steps over {stage.data}"
    yield "  Graph (nodes of one line may run at once):"
    for number, wave in enumerate(stage.graph.waves(), start=1):
        yield f"    {number}. {', '.join(node.name for node in wave)}"
    yield "  Nodes:"
    for node in stage.graph.order:
        yield from _node(stage.graph, node)
    for name, reason in stage.off.items():
        word = reason.partition(": ")[2]
        yield f"    {name}: off ({reason}: {CONDITIONS.get(word) or SECTIONS[word]})"
    yield from _algebra(plan, stage)
    for role in stage.trained:
        yield from _training(plan, stage, role)
    if stage.generates:
        yield f"    {_policy(stage)}"


def _node(graph: Graph, node: Node) -> Iterator[str]:
    target = f" to {node.to}" if node.to else ""
    options = "".join(f", {key} {value}" for key, value in node.options.items())
    yield f"    {node.name}: {node.action}{target}{options}{_rhythm(node)}"
    taken = [_renamed(parameter, field, node) for parameter, field in node.inputs.items()]
    given = [_renamed(output, field, node) for output, field in node.outputs.items()]
    if taken or given:
        yield f"      {', '.join(taken) or '-'} -> {', '.join(given) or '-'}"
    if waits := graph.dependencies(node):
        yield f"      waits for {', '.join(name for name in graph.names if name in waits)}"


def _renamed(parameter: str, field: str, node: Node) -> str:
    late = f" of {node.delay[field]} step(s) before" if field in node.delay else ""
    return (field if parameter == field else f"{parameter}: {field}") + late


def _rhythm(node: Node) -> str:
    words = []
    if node.every == "end":
        words.append("in the last step")
    elif node.every is not None:
        words.append(f"every {node.every} steps and in the last")
    if node.repeat_until is not None:
        repeat = node.repeat_until
        words.append(f"repeats from {repeat.start} until {repeat.condition}, at most {repeat.cap}x")
    return "".join(f"; {word}" for word in words)


def _algebra(plan: Plan, stage: Stage) -> Iterator[str]:
    longest = stage.longest_sample(plan.recipe)
    yield "  Batch of one step:"
    yield (
        f"    prompts: {stage.prompts_per_step} x {stage.samples_per_prompt} sample(s) = "
        f"{stage.samples} samples"
    )
    yield f"    tokens: at most {longest} a sample, {stage.samples * longest:,} a step"


def _training(plan: Plan, stage: Stage, role: str) -> Iterator[str]:
    batch, training = plan.algebra(stage, role), stage.trained[role]
    micro_batch = plan.recipe.roles.models()[role].micro_batch_tokens
    per_step = training.mini_batches * training.epochs
    yield f"  Training of {role}:"
    yield (
        f"    data parallel: {batch.dp} rank(s) x {batch.prompts_per_rank} prompts = "
        f"{batch.samples_per_rank} samples each"
    )
    yield (
        f"    mini-batches: {training.mini_batches} of {batch.mini_batch_samples} samples a rank "
        f"({batch.mini_batch_samples * batch.dp} over all ranks), {training.epochs} epoch(s)"
    )
    yield (
        f"    micro-batches: packed to at most {micro_batch} tokens, so at most "
        f"{batch.max_micro_batches} a rank and mini-batch"
    )
    yield (
        f"    optimizer steps: {per_step} a step, {stage.optimizer_steps(role)} in the stage; "
        f"lr {training.optimizer.lr:g}, {training.optimizer.schedule}"
    )


def _policy(stage: Stage) -> str:
    if any(node.delay for node in stage.graph.nodes):
        return "off-policy: nodes take fields of earlier steps (`delay`)"
    if ACTOR not in stage.trained:
        return "the actor does not train"
    if stage.off_policy:
        actor = stage.trained[ACTOR]
        count = actor.mini_batches * actor.epochs
        return f"off-policy: the batch feeds {count} optimizer steps, all but the first are stale"
    return "on-policy: one optimizer step on what its own weights sampled; no pass for old logprobs"
