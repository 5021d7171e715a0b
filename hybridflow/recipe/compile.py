"""From a recipe to a plan: stages, their graphs, batch sizes and who gets which devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from hybridflow.recipe.activate import activate, activation_faults, read_dataflow
from hybridflow.recipe.catalogue import GRAPH_INPUTS
from hybridflow.recipe.faults import Fault, RecipeError
from hybridflow.recipe.graph import Graph
from hybridflow.recipe.graph_check import type_faults
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.section import OptimizerSection
from hybridflow.recipe.source import KeyPath
from megatron_bridge.layout import ParallelLayout


@dataclass(frozen=True)
class Stage:
    """A run of equal steps over one graph.

    Attributes:
        name: ``warm_start`` or ``main``.
        key: where the recipe describes it.
        graph: the nodes that are on; ``every`` is a number or ``end``.
        off: nodes that are off, with the reason.
        data: file of the stage's rows.
        prompts_per_step, samples_per_prompt: P and G.
        mini_batches, epochs: optimizer steps of a step are their product.
    """

    name: str
    key: KeyPath
    graph: Graph
    off: Mapping[str, str]
    steps: int
    data: str
    prompts_per_step: int
    samples_per_prompt: int
    mini_batches: int
    epochs: int
    optimizer: OptimizerSection

    @property
    def samples(self) -> int:
        """Samples of a step, P * G."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole stage: those of every update that is due."""
        updates = [node for node in self.graph.nodes if node.call == "update"]
        runs = sum(
            node.due_count(1 + max(node.delay.values(), default=0), self.steps) for node in updates
        )
        return runs * self.mini_batches * self.epochs

    @property
    def off_policy(self) -> bool:
        """Whether a step's later mini-batches meet weights other than those that sampled."""
        return self.mini_batches * self.epochs > 1

    @property
    def generates(self) -> bool:
        """Whether the stage samples responses."""
        return any(node.call == "generate" for node in self.graph.nodes)

    def rows_of(self, batch: str) -> frozenset[str]:
        """What the graph takes of rows of ``batch`` (train or eval), without ``eval_``."""
        names = (name for name in self.graph.inputs if name in GRAPH_INPUTS)
        mine = (name for name in names if GRAPH_INPUTS[name].batch == batch)
        return frozenset(name.removeprefix("eval_") for name in mine)

    def longest_sample(self, recipe: Recipe) -> int:
        """Most tokens of a prompt and a response; the data's responses must fit a pass."""
        data, actor = recipe.data, recipe.roles.actor
        if self.generates and recipe.roles.rollout is not None:
            return data.max_prompt_tokens + recipe.roles.rollout.sampling.max_tokens
        return min(data.max_tokens or actor.micro_batch_tokens, actor.micro_batch_tokens)


@dataclass(frozen=True)
class BatchAlgebra:
    """How one step's samples become optimizer steps and packed forward passes.

    Attributes:
        prompts_per_rank, samples_per_rank: share of one data-parallel rank.
        mini_batch_samples: samples of one rank in one optimizer step.
        max_sample_tokens: longest possible prompt plus response.
        max_step_tokens: bound of the tokens of one step over all ranks.
        max_micro_batches: bound of one rank's packs in one optimizer step.
    """

    prompts: int
    samples: int
    dp: int
    prompts_per_rank: int
    samples_per_rank: int
    mini_batch_samples: int
    max_sample_tokens: int
    max_step_tokens: int
    max_micro_batches: int


@dataclass(frozen=True)
class Pool:
    """Devices (on the CPU: slots) and the roles that share them."""

    name: str
    devices: int
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """All that a run needs to know before a process starts.

    Attributes:
        stages: in the order in which they run.
        pools: by name; a pool is named after the role that it was made for.
        layouts: parallel layout of each model role in use.
        roles: every role that a node acts on; others of the recipe are not started.
    """

    recipe: Recipe
    stages: tuple[Stage, ...]
    pools: Mapping[str, Pool]
    layouts: Mapping[str, ParallelLayout]
    roles: tuple[str, ...]

    def pool_of(self, role: str) -> Pool | None:
        """The pool whose devices ``role`` uses; None for a reward, which needs none."""
        return next((pool for pool in self.pools.values() if role in pool.roles), None)

    @property
    def trainer_beside_rollout(self) -> ParallelLayout | None:
        """The actor's layout where the rollout uses its devices."""
        together = self.pool_of("actor") is self.pool_of("rollout")
        return self.layouts.get("actor") if together else None

    @property
    def devices(self) -> int:
        """Devices that all pools need together."""
        return sum(pool.devices for pool in self.pools.values())

    def algebra(self, stage: Stage) -> BatchAlgebra:
        """Batch sizes of a step of ``stage``."""
        actor = self.recipe.roles.actor
        dp = actor.parallel.dp
        prompts_per_rank = stage.prompts_per_step // dp
        samples_per_rank = prompts_per_rank * stage.samples_per_prompt
        mini_batch = samples_per_rank // stage.mini_batches
        longest = stage.longest_sample(self.recipe)
        samples_per_pack = max(1, actor.micro_batch_tokens // longest)
        return BatchAlgebra(
            prompts=stage.prompts_per_step,
            samples=stage.samples,
            dp=dp,
            prompts_per_rank=prompts_per_rank,
            samples_per_rank=samples_per_rank,
            mini_batch_samples=mini_batch,
            max_sample_tokens=longest,
            max_step_tokens=stage.samples * longest,
            max_micro_batches=ceil(mini_batch / samples_per_pack),
        )


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
    for make in (_warm_start, _main):
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
            "name": "warm_start",
            "steps": warm.steps,
            "data": warm.train or recipe.data.train,
            "prompts_per_step": warm.prompts_per_step,
            "samples_per_prompt": 1,
            "mini_batches": 1,
            "epochs": 1,
            "optimizer": optimizer,
        },
    )


def _main(recipe: Recipe) -> tuple[Stage | None, list[Fault]]:
    actor, data = recipe.roles.actor, recipe.data
    return _stage(
        recipe,
        (),
        recipe.dataflow,
        {
            "name": "main",
            "steps": recipe.steps,
            "data": data.train,
            "prompts_per_step": data.prompts_per_step,
            "samples_per_prompt": data.samples_per_prompt,
            "mini_batches": actor.mini_batches,
            "epochs": actor.epochs,
            "optimizer": actor.optimizer,
        },
    )


def _stage(
    recipe: Recipe, key: KeyPath, dataflow: object, settings: dict
) -> tuple[Stage | None, list[Fault]]:
    graph, faults = read_dataflow(recipe, (*key, "dataflow"), dataflow)
    kinds = recipe.roles.kinds()
    if graph is None:
        return None, faults
    if graph.cycle():
        return None, faults + type_faults(graph, kinds)
    conditions = {
        "off_policy": settings["mini_batches"] * settings["epochs"] > 1
        or recipe.algorithm.rollout_correction is not None,
        "kl": recipe.algorithm.kl.coef > 0,
        "rollout": recipe.roles.rollout is not None,
    }
    sections = {
        "evaluation": recipe.evaluation.every if recipe.evaluation else None,
        "checkpoint": recipe.checkpoint.every,
    }
    active, off = activate(graph, conditions, sections)
    settings["samples_per_prompt"] = _samples(active, settings["samples_per_prompt"])
    faults += type_faults(graph, kinds, active.names)
    faults += activation_faults(graph, off, kinds)
    return Stage(key=key, graph=active, off=off, **settings), faults


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
    layouts = {role: recipe.layout(role) for role in used if kinds[role] == "model"}
    return Plan(recipe, tuple(stages), _pools(recipe, used, layouts), layouts, tuple(used))


def _pools(
    recipe: Recipe, used: list[str], layouts: Mapping[str, ParallelLayout]
) -> dict[str, Pool]:
    needs = {role: layout.world for role, layout in layouts.items()}
    if "rollout" in used:
        servers = recipe.roles.servers.parallel
        needs["rollout"] = servers.tp * servers.dp
    hosts = {role: _host(recipe, role, needs) for role in needs}
    return {
        host: Pool(
            host,
            max(needs[role] for role in needs if hosts[role] == host),
            tuple(role for role in needs if hosts[role] == host),
        )
        for host in needs
        if hosts[host] == host
    }


def _host(recipe: Recipe, role: str, needs: Mapping[str, int]) -> str:
    """The role in whose pool ``role`` lives; its own when its host is not in use."""
    sections = {"reference": recipe.roles.reference, "rollout": recipe.roles.rollout}
    section = sections.get(role)
    host = section.colocate if section is not None else None
    return host if host is not None and host in needs else role
