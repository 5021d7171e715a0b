"""The roles of a run as worker groups, and what several of them do together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.batch import Batch
from hybridflow.cluster import Pool, Session, WorkerGroup, wait_until_started
from hybridflow.dataflow.between_steps import BetweenSteps
from hybridflow.dataflow.publisher import Publisher
from hybridflow.dataflow.scoring import Scoring
from hybridflow.dataflow.settings import (
    engine_config,
    loss_settings,
    optimizer_settings,
    sampling,
    server_config,
    temperature,
    value_loss_settings,
)
from hybridflow.dataflow.state import SharedState
from hybridflow.megatron.config import LossSettings, ValueLossSettings
from hybridflow.recipe.graph import Node
from hybridflow.recipe.own_code import OwnModule
from hybridflow.recipe.placement import engine_slots
from hybridflow.recipe.plan import ACTOR, Plan, Stage
from hybridflow.recipe.signature import MEGATRON_KINDS
from hybridflow.rollout.engines import FleetEvent
from hybridflow.rollout.fleet import Fleet
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
            config = engine_config(plan, role, self.kinds[role], stage)
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
        return sampling(self.state, temperature, seed)

    def temperature(self, stage: Stage, node: Node) -> float:
        """Of a node's responses: the sampler's, and 1 for those that the data bring."""
        return temperature(self.state, stage, node)

    def value_loss(self, stage: Stage, role: str, name: str) -> ValueLossSettings:
        """How a critic turns a batch of ``stage`` into optimizer steps."""
        return value_loss_settings(self.recipe.algorithm, self.state, stage, role, name)

    def loss(self, stage: Stage, node: Node) -> LossSettings:
        """How a policy's node of ``stage`` turns a batch into a loss, and that into optimizer
        steps."""
        version = self.version if stage.generates else None
        return loss_settings(self.recipe.algorithm, self.state, stage, node, version)

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


def _engines(plan: Plan, session: Session, pool: Pool | None) -> list[RolloutEngine]:
    """Every rollout engine, starting: one group each, on the first of its server's slots."""
    assert pool is not None, "a rollout has devices"
    section = plan.recipe.roles.servers
    parent = section.sync.directory if section.sync.transport == "direct" else None
    settings = {"server": server_config(plan.recipe), "sync_parent": parent}
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
