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
from hybridflow.recipe.signature import MEGATRON_KINDS
from hybridflow.recipe.source import KeyPath
from megatron_bridge.layout import ParallelLayout

ACTOR = "actor"


@dataclass(frozen=True)
class Training:
    """How one role turns the samples of a step into optimizer steps.

    Attributes:
        goes_on: whether its optimizer is that of the stage before, rather than a fresh one.
    """

    mini_batches: int
    epochs: int
    optimizer: OptimizerSection
    goes_on: bool = False


@dataclass(frozen=True)
class Stage:
    """A run of equal steps over one graph.

    Attributes:
        name: ``warm_start``, ``critic_warmup`` or ``main``.
        key: where the recipe describes it.
        graph: the nodes that are on; ``every`` is a number or ``end``.
        off: nodes that are off, with the reason.
        data: file of the stage's rows.
        prompts_per_step, samples_per_prompt: P and G.
        trained: the roles that the stage's updates train.
        named: every role that a node names, of nodes that are off too.
    """

    name: str
    key: KeyPath
    graph: Graph
    off: Mapping[str, str]
    steps: int
    data: str
    prompts_per_step: int
    samples_per_prompt: int
    trained: Mapping[str, Training]
    named: frozenset[str] = frozenset()

    @property
    def samples(self) -> int:
        """Samples of a step, P * G."""
        return self.prompts_per_step * self.samples_per_prompt

    def optimizer_steps(self, role: str) -> int:
        """Optimizer steps of ``role`` in the whole stage: those of every update that is due."""
        updates = [n for n in self.graph.nodes if n.call == "update" and n.role == role]
        if not updates or role not in self.trained:
            return 0
        training = self.trained[role]
        runs = sum(
            node.due_count(1 + max(node.delay.values(), default=0), self.steps) for node in updates
        )
        return runs * training.mini_batches * training.epochs

    def leads(self, recipe: Recipe) -> str | None:
        """The role whose updates are the stage's own: the actor or, in a recipe without one, the
        sole model that it trains; None where others alone are trained."""
        if recipe.roles.actor is not None:
            return ACTOR if ACTOR in self.trained else None
        return next(iter(self.trained)) if len(self.trained) == 1 else None

    @property
    def goes_on(self) -> bool:
        """Whether it is the stage before with the actor training: its data go on, too."""
        return any(training.goes_on for training in self.trained.values())

    @property
    def off_policy(self) -> bool:
        """Whether a step's later mini-batches meet weights other than those that sampled."""
        actor = self.trained.get(ACTOR)
        return actor is not None and actor.mini_batches * actor.epochs > 1

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
        data = recipe.data
        if self.generates and recipe.roles.rollout is not None:
            return data.max_prompt_tokens + recipe.roles.rollout.sampling.max_tokens
        packs = self.pack_tokens(recipe).values()
        return min([*packs, *([] if data.max_tokens is None else [data.max_tokens])])

    def pack_tokens(self, recipe: Recipe) -> dict[str, int]:
        """Most tokens of one forward pass of each model that the stage acts on."""
        models = recipe.roles.models()
        acting = dict.fromkeys(role for node in self.graph.nodes for role in node.roles)
        return {role: models[role].micro_batch_tokens for role in acting if role in models}


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
        together = self.pool_of(ACTOR) is self.pool_of("rollout")
        return self.layouts.get(ACTOR) if together else None

    @property
    def devices(self) -> int:
        """Devices that all pools need together."""
        return sum(pool.devices for pool in self.pools.values())

    def training(self, stage: Stage, role: str) -> Training | None:
        """How ``role`` trains in ``stage``, else in the next stage that trains it."""
        course = self._course(stage, role)
        return course[0].trained[role] if course else None

    def scheduled_steps(self, stage: Stage, role: str) -> int:
        """Optimizer steps that the optimizer which ``role`` has in ``stage`` takes in all: those
        over which its learning-rate schedule runs."""
        return sum(one.optimizer_steps(role) for one in self._course(stage, role))

    def _course(self, stage: Stage, role: str) -> list[Stage]:
        """The stages that share one optimizer of ``role``, that of ``stage`` or of the next one
        that trains it."""
        courses: list[list[Stage]] = []
        for one in self.stages:
            if role in one.trained:
                if not courses or not one.trained[role].goes_on:
                    courses.append([])
                courses[-1].append(one)
        place = self.stages.index(stage)
        return next((c for c in courses if self.stages.index(c[-1]) >= place), [])

    def algebra(self, stage: Stage, role: str) -> BatchAlgebra:
        """Batch sizes of a step of ``stage`` in which ``role`` is trained."""
        section = self.recipe.roles.models()[role]
        dp = self.recipe.layout(role).dp
        prompts_per_rank = stage.prompts_per_step // dp
        samples_per_rank = prompts_per_rank * stage.samples_per_prompt
        mini_batch = samples_per_rank // stage.trained[role].mini_batches
        longest = stage.longest_sample(self.recipe)
        samples_per_pack = max(1, section.micro_batch_tokens // longest)
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
            "name": "warm_start",
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
