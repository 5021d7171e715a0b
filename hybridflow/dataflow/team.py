"""The roles of a run as worker groups, and what several of them do together."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybridflow.algorithms.losses.preference import PreferenceSettings
from hybridflow.batch import Batch
from hybridflow.cluster import Pool, Session, WorkerGroup, wait_until_started
from hybridflow.dataflow.between_steps import BetweenSteps
from hybridflow.dataflow.publisher import Publisher
from hybridflow.dataflow.scoring import Scoring
from hybridflow.dataflow.state import SharedState
from hybridflow.megatron.config import (
    CorrectionSettings,
    EngineConfig,
    LossSettings,
    OptimizerSettings,
    ValueLossSettings,
)
from hybridflow.recipe import catalogue
from hybridflow.recipe.catalogue_losses import PUBLISHED_CLIP
from hybridflow.recipe.graph import Node
from hybridflow.recipe.own_code import OwnModule
from hybridflow.recipe.placement import engine_slots
from hybridflow.recipe.plan import ACTOR, WARM_START, Plan, Stage
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.schema_algorithm import AlgorithmSection, SapoSection
from hybridflow.recipe.signature import MEGATRON_KINDS
from hybridflow.rollout.engines import FleetEvent
from hybridflow.rollout.fleet import Fleet
from hybridflow.rollout.launch import ServerConfig
from hybridflow.rollout.protocol import Sampling
from hybridflow.weight_sync.publication import PublishReport
from hybridflow.workers.model import ModelWorker
from hybridflow.workers.reward import RewardWorker
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_engine import RolloutEngine


class Team:
    """Builds every role's group in the session's pools.

    Args:
        on_event: is told what happens to rollout engines, on any thread.
        note_version: keeps the number of each published version.
        state: the run's live values, which calls read anew in every step.

    Attributes:
        groups: every role's group, but for the rollout engines, which are the fleet's.
        memory: of the models beside the rollout, the fullest rank's, as last measured.
        between: what other threads want done between steps.
        rewards: what the reward roles do.
        publisher: of weights to the rollout engines; None in a run whose graphs need none.
    """

    def __init__(
        self,
        plan: Plan,
        session: Session,
        stage: Stage,
        on_event: Callable[[FleetEvent], None],
        note_version: Callable[[int], None],
        state: SharedState,
    ) -> None:
        recipe = plan.recipe
        self.recipe = recipe
        self.state = state
        self.between = BetweenSteps()
        self.kinds = recipe.roles.kinds()
        self._version = 0
        self.memory: dict[str, float] = {}
        home = plan.pool_of("rollout") if "rollout" in plan.roles else None
        shared = () if home is None else home.roles
        self._plan = plan
        self._beside_rollout = [role for role in shared if self.kinds[role] in MEGATRON_KINDS]
        trained = {role for one in plan.stages for role in one.trained}
        self._trained = [role for role in plan.roles if role in trained]
        pools = {name: session.pool(name, pool.devices) for name, pool in plan.pools.items()}
        self.groups: dict[str, WorkerGroup] = {}

        def scorers(role: str, settings: Mapping[str, Any]) -> WorkerGroup:
            workers = recipe.roles.rewards()[role].workers
            return session.group(role, RewardWorker, workers, None, settings)

        self.rewards = Scoring(plan, self.groups, scorers)
        engines: list[RolloutEngine] = []
        for role in plan.roles:
            home = plan.pool_of(role)
            pool = None if home is None else pools[home.name]
            if self.kinds[role] == "rollout":
                engines = _engines(plan, session, pool)
                continue
            if self.kinds[role] == "reward":
                self.groups[role] = self.rewards.start(role)
                continue
            config = _engine(plan, role, self.kinds[role], stage)
            told = {"engine": config, "imports": [OwnModule.of(name) for name in recipe.imports]}
            self.groups[role] = session.group(role, ModelWorker, config.layout, pool, told)
        wait_until_started([*self.groups.values(), *(engine.group for engine in engines)])
        self.publisher: Publisher | None = None
        if engines:
            self.publisher = Publisher(plan, self.groups["actor"], engines, on_event, note_version)

    @property
    def rollout(self) -> Fleet[RolloutEngine]:
        """The fleet of a run that has one."""
        assert self.publisher is not None, "checked graphs act on started roles alone"
        return self.publisher.fleet

    @property
    def version(self) -> int:
        """Of the weights that the servers hold; counts up over the whole run."""
        return self._version if self.publisher is None else self.publisher.version

    @version.setter
    def version(self, version: int) -> None:
        """Go on counting from ``version``; the next publication has a later one."""
        self._version = version
        if self.publisher is not None:
            self.publisher.version = version

    @property
    def last_publish(self) -> PublishReport | None:
        """What the last publication did."""
        return None if self.publisher is None else self.publisher.last

    def sampling(self, temperature: float, seed: int) -> Sampling:
        """The live sampling settings at a temperature and seed."""
        state = self.state
        return Sampling(
            max_tokens=int(state["max_tokens"]),
            temperature=temperature,
            top_p=state["top_p"],
            top_k=int(state["top_k"]),
            seed=seed,
        )

    def temperature(self, stage: Stage, node: Node) -> float:
        """Of a node's responses: the sampler's, and 1 for those that the data bring."""
        return (
            self.state["temperature"] if stage.graph.is_sampled(node.inputs["responses"]) else 1.0
        )

    def value_loss(self, stage: Stage, role: str, name: str) -> ValueLossSettings:
        """How a critic turns a batch of ``stage`` into optimizer steps."""
        algorithm = self.recipe.algorithm
        return ValueLossSettings(
            name=name,
            clip=algorithm.value_clip or ValueLossSettings.clip,
            aggregation=algorithm.value_aggregation,
            **self._passes(stage, role),
        )

    def _passes(self, stage: Stage, role: str) -> dict[str, Any]:
        """How often ``role`` passes over a batch and, beside the recipe's, at what rate."""
        training = stage.trained.get(role)
        if training is None:  # it is looked at, not trained
            return {}
        return {
            "mini_batches": training.mini_batches,
            "epochs": training.epochs,
            "lr_scale": self.state[f"{role}_lr"] / training.optimizer.lr,
        }

    def loss(self, stage: Stage, node: Node) -> LossSettings:
        """How a policy's node of ``stage`` turns a batch into a loss, and that into optimizer
        steps."""
        role, name, algorithm = str(node.role), node.options["loss"], self.recipe.algorithm
        entry = catalogue.LOSSES.get(name)
        low, high = algorithm.clip_bounds(PUBLISHED_CLIP if entry is None else entry.clip)
        gate = algorithm.sapo or SapoSection()
        of_samples = stage.generates and entry is not None and "advantages" in entry.needs
        return LossSettings(
            name=name,
            clip_low=low,
            clip_high=high,
            dual_clip=algorithm.dual_clip or LossSettings.dual_clip,
            tau_positive=gate.tau_positive,
            tau_negative=gate.tau_negative,
            kl_coef=self.state["kl_coef"] if _pays_kl(algorithm, stage, role) else 0.0,
            kl_estimator=algorithm.kl.estimator,
            **(_corrections(algorithm, self.state) if of_samples else {}),
            preference=PreferenceSettings(**algorithm.preference.model_dump()),
            **_average(algorithm, stage),
            temperature=self.temperature(stage, node),
            **self._passes(stage, role),
            agreement_threshold=algorithm.agreement.threshold,
            agreement_bound=algorithm.agreement.bound if of_samples else None,
            weight_version=self.version if stage.generates else None,
        )

    def begin_stage(self, stage: Stage, *, resuming: bool = False) -> None:
        """A fresh optimizer for the roles that ``stage`` trains, but for those whose optimizer
        goes on from the stage before (``resuming``: for them too, to load its state into)."""
        for role, training in stage.trained.items():
            if resuming or not training.goes_on:
                settings = optimizer_settings(self._plan, stage, role)
                self.groups[role].run(ModelWorker.begin_stage, settings)

    def publish(self) -> int:
        """Bring the actor's weights to every engine as the next version; that version."""
        assert self.publisher is not None, "checked graphs act on started roles alone"
        return self.publisher.publish()

    def update(self, role: str, batch: Batch, loss: LossSettings) -> dict[str, float]:
        """The optimizer steps of one training step; its metrics."""
        if self.publisher is not None and role == ACTOR:
            self.publisher.actor_moved()
        return self.groups[role].run(ModelWorker.update, batch, loss)

    def evaluate(self, role: str, batch: Batch, loss: LossSettings) -> dict[str, float]:
        """The loss and its metrics under a role's weights, without a step."""
        return self.groups[role].run(ModelWorker.evaluate, batch, loss)

    def make_room(self) -> None:
        """Before a rollout: models on its devices give up what training alone needs, and take it
        back when they compute again."""
        for role in self._beside_rollout:
            ranks = self.groups[role].run(ModelWorker.switch_to_rollout)
            for name in ("held", "peak", "released"):
                most = max(getattr(memory, name) for memory in ranks)
                self.memory[f"memory/{role}_{name}_bytes"] = float(most)

    def save(self, folder: Path) -> None:
        """Every trained role's state in a folder of its name, to go on from."""
        for role in self._trained:
            self.groups[role].run(ModelWorker.save, str(folder / role))

    def load(self, folder: Path) -> None:
        """Go on from what ``save`` wrote."""
        for role in self._trained:
            self.groups[role].run(ModelWorker.load, str(folder / role))

    def export(self, folder: Path) -> list[Path]:
        """The actor in HuggingFace format, and each further trained model in ``FOLDER_ROLE``
        beside it; these folders."""
        roles = dict.fromkeys(["actor", *self._trained])
        folders = []
        for role in (role for role in roles if role in self.groups):
            name = folder.name if role == ACTOR else f"{folder.name}_{role}"
            folders.append(folder.with_name(name))
            self.groups[role].run(
                ModelWorker.save_pretrained, str(folders[-1]), self._scores_tokens(role)
            )
        return folders

    def _scores_tokens(self, role: str) -> bool:
        """Whether a reward model learns scores of tokens."""
        graphs = [stage.graph for stage in self._plan.stages]
        updates = [n for g in graphs for n in g.nodes if (n.role, n.call) == (role, "update")]
        return any(node.options["loss"] == "bradley_terry_token" for node in updates)

    def close(self) -> None:
        """Remove written versions, take no more requests; the session ends the workers."""
        if self.publisher is not None:
            self.publisher.close()


def _pays_kl(algorithm: AlgorithmSection, stage: Stage, role: str) -> bool:
    """Whether a KL is a term of the role's loss in the stage: a warm start reads no reference."""
    updates = [n for n in stage.graph.nodes if n.role == role and n.call == "update"]
    given = {name for node in updates for name in node.inputs}
    return algorithm.kl.place == "loss" and bool(given & {"ref_logprobs", "ref_hidden"})


def _average(algorithm: AlgorithmSection, stage: Stage) -> dict[str, Any]:
    """How the losses of tokens become one number: a warm start's is the mean, whatever the
    algorithm behind it takes."""
    if stage.name == WARM_START:
        return {}
    return {
        "aggregation": algorithm.aggregation,
        "loss_divisor": algorithm.loss_divisor or LossSettings.loss_divisor,
    }


def _corrections(algorithm: AlgorithmSection, state: SharedState) -> dict[str, Any]:
    """Settings of losses with advantages: a supervised loss, or that of a model which learns from
    outcomes beside the policy, has no use for them."""
    told, mask = algorithm.rollout_correction, algorithm.off_policy_mask
    correction = told and CorrectionSettings(
        told.method, told.level, low=told.low or 1 / told.high, high=told.high
    )
    return {
        "entropy_coef": state["entropy_coef"],
        "measure_entropy": algorithm.entropy,
        "correction": correction,
        "off_policy_bound": mask and mask.bound,
    }


def optimizer_settings(plan: Plan, stage: Stage, role: str) -> OptimizerSettings | None:
    """The role's optimizer in the stage or, where it does not train then, in the next one that
    trains it, with the number of its optimizer steps; None for a role that never trains."""
    training = plan.training(stage, role)
    if training is None:
        return None
    section = training.optimizer
    return OptimizerSettings(
        lr=section.lr,
        betas=(section.betas[0], section.betas[1]),
        eps=section.eps,
        weight_decay=section.weight_decay,
        clip_grad=section.clip_grad,
        schedule=section.schedule,
        warmup_steps=section.warmup_steps,
        min_lr=section.min_lr,
        total_steps=plan.scheduled_steps(stage, role),
    )


def _engines(plan: Plan, session: Session, pool: Pool | None) -> list[RolloutEngine]:
    """Every rollout engine, starting: one group each, on the first of its server's slots."""
    assert pool is not None, "a rollout has devices"
    section = plan.recipe.roles.servers
    parent = section.sync.directory if section.sync.transport == "direct" else None
    settings = {"server": _server(plan.recipe), "sync_parent": parent}
    parallel, nodes = section.parallel, [place.node for place in pool.places]
    servers = engine_slots(nodes, parallel.tp, parallel.dp, plan.trainer_beside_rollout)

    def engine(index: int, slots: tuple[int, ...]) -> RolloutEngine:
        name = "rollout" if parallel.dp == 1 else f"rollout-{index}"
        gpus = [gpu for slot in slots if (gpu := pool.places[slot].gpu) is not None]
        own = settings | {"gpus": tuple(gpus) or None}
        return RolloutEngine(
            name,
            partial(session.group, name, RolloutWorker, 1, pool, own, first_slot=slots[0]),
            start_seconds=section.start_timeout_seconds,
            request_seconds=section.request_timeout_seconds,
        )

    return [engine(index, slots) for index, slots in enumerate(servers)]


def _engine(plan: Plan, role: str, kind: str, stage: Stage) -> EngineConfig:
    recipe = plan.recipe
    return EngineConfig(
        model_path=recipe.model_path(role),
        layout=plan.layouts[role],
        dtype=getattr(torch, recipe.model.dtype),
        seed=recipe.seed,
        optimizer=optimizer_settings(plan, stage, role),
        micro_batch_tokens=recipe.roles.models()[role].micro_batch_tokens,
        head="value" if kind == "value" else "vocabulary",
        keep_reference_head=role == ACTOR and recipe.algorithm.kl.estimator == "full",
    )


def _server(recipe: Recipe) -> ServerConfig:
    section = recipe.roles.servers
    return ServerConfig(
        engine=section.engine,
        model_path=recipe.model.path,
        dtype=recipe.model.dtype,
        tp=section.parallel.tp,
        ep=section.parallel.ep,
        threads=section.threads,
        max_running_requests=section.max_running_requests,
        prefix_cache=section.sync.pause != "in_place",
        start_timeout=section.start_timeout_seconds,
        request_timeout=section.request_timeout_seconds,
        python=section.python,
        token=secrets.token_hex(32),  # of this run: other users of the hosts reach 127.0.0.1 too
    )
