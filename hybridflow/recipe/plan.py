"""What a recipe comes to: stages, their batch sizes, and who gets which devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from hybridflow.recipe.catalogue import GRAPH_INPUTS
from hybridflow.recipe.graph import Graph
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.section import OptimizerSection
from hybridflow.recipe.source import KeyPath
from megatron_bridge.layout import ParallelLayout

ACTOR = "actor"
WARM_START = "warm_start"
"""The stage before all others, where a recipe has one."""


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
