"""From a recipe to its plan: each stage's graph, what is on in it, and the pools of devices."""

from collections.abc import Mapping

from hybridflow.recipe.activate import activate, activation_faults, read_dataflow
from hybridflow.recipe.catalogue import GRAPH_INPUTS
from hybridflow.recipe.faults import Fault, RecipeError
from hybridflow.recipe.graph import Graph
from hybridflow.recipe.graph_check import type_faults
from hybridflow.recipe.plan import ACTOR, WARM_START, Plan, Pool, Stage, Training
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.section import OptimizerSection
from hybridflow.recipe.signature import MEGATRON_KINDS
from hybridflow.recipe.source import KeyPath
from megatron_bridge.layout import ParallelLayout


def compile_recipe(recipe: Recipe) -> Plan:
    """The plan of a recipe; raises RecipeError with every fault of its graphs.

    ``checks.check`` looks at files, the model and sizes as well; run it first.
    """
    stages, faults = compile_stages(recipe)
    if faults:
        raise RecipeError(faults)
    return make_plan(recipe, stages)


def compile_stages(recipe: Recipe) -> tuple[list[Stage], list[Fault]]:
    """The stages whose graph could be read, and every fault of the graphs."""
    stages, faults = [], []
    for make in (_warm_start, _critic_warmup, _main):
        made = make(recipe)
        if made is not None:
            stage, found = made
            faults.extend(fault for fault in found if fault not in faults)
            stages.extend([stage] if stage else [])
    return stages, faults


def _warm_start(recipe: Recipe) -> tuple[Stage | None, list[Fault]] | None:
    warm = recipe.warm_start
    if warm is None:
        return None
    optimizer = OptimizerSection(**warm.model_dump(include=set(OptimizerSection.model_fields)))
    return _stage(
        recipe,
        ("warm_start",),
        warm.dataflow,
        {
            "name": WARM_START,
            "steps": warm.steps,
            "data": warm.train or recipe.data.train,
            "prompts_per_step": warm.prompts_per_step,
            "samples_per_prompt": 1,
        },
        {**_of_roles(recipe), ACTOR: Training(1, 1, optimizer)},
    )


def _critic_warmup(recipe: Recipe) -> tuple[Stage | None, list[Fault]] | None:
    """The main stage's graph without the nodes that are there for the actor's training."""
    steps = recipe.algorithm.critic_warmup_steps
    if not steps:
        return None
    training = _of_roles(recipe)
    training.pop(ACTOR, None)
    settings = _main_settings(recipe) | {"name": "critic_warmup", "steps": steps}
    return _stage(recipe, (), recipe.dataflow, settings, training)


def _main(recipe: Recipe) -> tuple[Stage | None, list[Fault]]:
    training = _of_roles(recipe, goes_on=recipe.algorithm.critic_warmup_steps > 0)
    return _stage(recipe, (), recipe.dataflow, _main_settings(recipe), training)


def _of_roles(recipe: Recipe, goes_on: bool = False) -> dict[str, Training]:
    """Each trained role's own settings; ``goes_on``: a warm-up of all but the actor came before."""
    return {
        role: Training(s.mini_batches, s.epochs, s.optimizer, goes_on and role != ACTOR)
        for role, s in recipe.roles.trained().items()
        if s.optimizer is not None
    }


def _main_settings(recipe: Recipe) -> dict:
    data = recipe.data
    return {
        "name": "main",
        "steps": recipe.steps,
        "data": data.train,
        "prompts_per_step": data.prompts_per_step,
        "samples_per_prompt": data.samples_per_prompt,
    }


def _stage(
    recipe: Recipe,
    key: KeyPath,
    dataflow: object,
    settings: dict,
    training: dict[str, Training],
) -> tuple[Stage | None, list[Fault]]:
    graph, faults = read_dataflow(recipe, (*key, "dataflow"), dataflow)
    kinds, trained = recipe.roles.kinds(), recipe.roles.trained()
    if graph is None:
        return None, faults
    if graph.cycle():
        return None, faults + type_faults(graph, kinds, trained)
    conditions = _conditions(recipe, training.get(ACTOR))
    sections = {
        "evaluation": recipe.evaluation.every if recipe.evaluation else None,
        "checkpoint": recipe.checkpoint.every,
    }
    absent = _absent(recipe, graph)
    active, off = activate(graph, conditions, sections, absent)
    settings["samples_per_prompt"] = _samples(active, settings["samples_per_prompt"])
    faults += type_faults(graph, kinds, trained, active.names)
    faults += activation_faults(graph, off, kinds, absent)
    updated = {node.role for node in active.nodes if node.call == "update"}
    training = {role: one for role, one in training.items() if role in updated}
    named = frozenset(role for node in graph.nodes for role in node.roles)
    stage = Stage(key=key, graph=active, off=off, trained=training, named=named, **settings)
    return stage, faults


def _conditions(recipe: Recipe, actor: Training | None) -> dict[str, bool]:
    """Which words of ``when`` hold in a stage; ``actor``: None where it does not train."""
    kl = recipe.algorithm.kl
    off_policy = actor is not None and (
        actor.mini_batches * actor.epochs > 1 or recipe.algorithm.rollout_correction is not None
    )
    return {
        "off_policy": off_policy,
        "kl": kl.coef > 0,
        "rollout": recipe.roles.rollout is not None,
        "old_logprobs": off_policy or (kl.coef > 0 and kl.place == "reward"),
        "actor_trains": actor is not None,
    }


def _absent(recipe: Recipe, graph: Graph) -> frozenset[str]:
    """Fields of token rewards from roles that score whole responses, models among them."""
    by_token = {role for role, one in recipe.roles.rewards().items() if one.level == "token"}
    scoring = [n for n in graph.nodes if n.call == "score" and n.role not in by_token]
    return frozenset(f for n in scoring for o, f in n.outputs.items() if o == "token_rewards")


def _samples(graph: Graph, asked: int) -> int:
    """Responses of a prompt: as many as the data brings where the graph samples none."""
    brought = [GRAPH_INPUTS[name].samples or 0 for name in graph.inputs if name in GRAPH_INPUTS]
    if any(node.call == "generate" for node in graph.nodes):
        return asked
    return max(brought, default=0) or asked


def make_plan(recipe: Recipe, stages: list[Stage]) -> Plan:
    """Pools and layouts for the roles that the stages use."""
    acted = {role for stage in stages for node in stage.graph.nodes for role in node.roles}
    kinds = recipe.roles.kinds()
    used = [role for role in kinds if role in acted]
    layouts = {role: recipe.layout(role) for role in used if kinds[role] in MEGATRON_KINDS}
    return Plan(recipe, tuple(stages), _pools(recipe, used, layouts), layouts, tuple(used))


def _pools(
    recipe: Recipe, used: list[str], layouts: Mapping[str, ParallelLayout]
) -> dict[str, Pool]:
    needs = {role: layout.world for role, layout in layouts.items()}
    if "rollout" in used:
        servers = recipe.roles.servers.parallel
        needs["rollout"] = servers.tp * servers.dp
    asked = recipe.roles.hosts()
    hosts = {role: _host(asked, role, needs) for role in needs}
    return {
        host: Pool(
            host,
            max(needs[role] for role in needs if hosts[role] == host),
            tuple(role for role in needs if hosts[role] == host),
        )
        for host in needs
        if hosts[host] == host
    }


def _host(asked: Mapping[str, str], role: str, needs: Mapping[str, int]) -> str:
    """The role in whose pool ``role`` lives; its own when its host is not in use."""
    seen = {role}
    while (host := asked.get(role)) in needs and host not in seen:
        assert host is not None
        seen.add(host)
        role = host
    return role
