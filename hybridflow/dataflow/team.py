"""The roles of a run as worker groups, and what several of them do together."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from hybridflow.cluster import ClusterError, Pool, Session, WorkerGroup
from hybridflow.megatron.config import EngineConfig, LossSettings, OptimizerSettings
from hybridflow.recipe.compile import Plan, Stage
from hybridflow.recipe.schema import OptimizerSection, Recipe
from hybridflow.rollout.background import in_background
from hybridflow.rollout.engines import EngineFailed, FleetEvent, fault_of
from hybridflow.rollout.fleet import Fleet
from hybridflow.rollout.launch import ServerConfig
from hybridflow.rollout.protocol import Sampling
from hybridflow.weight_sync import PublishReport, remove_versions
from hybridflow.workers.model import ModelWorker, WrittenVersion
from hybridflow.workers.reward import RewardWorker
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_engine import GRACE_SECONDS, RolloutEngine
from megatron_bridge.layout import ParallelLayout

SYNC_PREFIX = "hybridflow-sync-"


class Team:
    """Builds every role's group in the session's pools.

    Args:
        on_event: is told what happens to rollout engines, on any thread.

    Attributes:
        version: of the weights that the servers hold; counts up over the whole run.
        groups: every role's group, but for the rollout engines, which are the fleet's.
        fleet: the rollout engines; None in a run whose graphs need none.
    """

    def __init__(
        self,
        plan: Plan,
        session: Session,
        stage: Stage,
        on_event: Callable[[FleetEvent], None],
    ) -> None:
        recipe = plan.recipe
        self.recipe = recipe
        self.kinds = recipe.roles.kinds()
        self.version = 0
        self.last_publish: PublishReport | None = None
        self._separate_processes = session.separate_processes
        self._sync = _sync_directory(recipe)
        pools = {name: session.pool(name, pool.devices) for name, pool in plan.pools.items()}
        self.groups: dict[str, WorkerGroup] = {}
        engines: list[RolloutEngine] = []
        for role in plan.roles:
            home = plan.pool_of(role)
            pool = None if home is None else pools[home.name]
            if self.kinds[role] == "rollout":
                engines = _engines(recipe, session, pool)
                continue
            worker, layout, settings = self._member(role, self.kinds[role], stage)
            self.groups[role] = session.group(role, worker, layout, pool, settings)
        for starting in (*self.groups.values(), *engines):
            starting.wait_until_started()
        self._written: WrittenVersion | None = None
        self.fleet = self._fleet(engines, on_event) if engines else None

    def _fleet(
        self, engines: list[RolloutEngine], on_event: Callable[[FleetEvent], None]
    ) -> Fleet[RolloutEngine]:
        section = self.recipe.roles.rollout
        return Fleet(
            engines,
            self._repair,
            request_seconds=section.request_timeout_seconds + 2 * GRACE_SECONDS,
            repair_seconds=section.start_timeout_seconds + section.request_timeout_seconds,
            on_event=on_event,
        )

    @property
    def rollout(self) -> Fleet[RolloutEngine]:
        """The fleet of a run that has one."""
        assert self.fleet is not None, "checked graphs act on started roles alone"
        return self.fleet

    def _member(
        self, role: str, kind: str, stage: Stage
    ) -> tuple[type, ParallelLayout | int, dict[str, Any]]:
        """Worker class, layout and settings of a role."""
        recipe = self.recipe
        if kind == "model":
            layout = recipe.layout(role)
            return ModelWorker, layout, {"engine": _engine(recipe, role, layout, stage)}
        section = recipe.roles.rewards()[role]
        settings = {
            "model_path": recipe.model.path,
            "function": section.function,
            "parameters": section.parameters,
            "timeout_seconds": section.timeout_seconds,
            "own_process": self._separate_processes,
        }
        return RewardWorker, section.workers, settings

    def sampling(self, temperature: float, seed: int) -> Sampling:
        """The recipe's sampling at a temperature and seed."""
        told = self.recipe.roles.rollout.sampling
        return Sampling(
            max_tokens=told.max_tokens,
            temperature=temperature,
            top_p=told.top_p,
            top_k=told.top_k,
            seed=seed,
        )

    def loss(self, stage: Stage, name: str) -> LossSettings:
        """How the actor turns a batch of ``stage`` into optimizer steps."""
        algorithm = self.recipe.algorithm
        low, high = algorithm.clip_bounds
        return LossSettings(
            name=name,
            clip_low=low,
            clip_high=high,
            kl_coef=algorithm.kl.coef,
            kl_estimator=algorithm.kl.estimator,
            aggregation=algorithm.aggregation,
            temperature=self.recipe.roles.rollout.sampling.temperature if stage.generates else 1.0,
            mini_batches=stage.mini_batches,
            epochs=stage.epochs,
            agreement_threshold=algorithm.agreement.threshold,
            agreement_bound=algorithm.agreement.bound if stage.generates else None,
            weight_version=self.version if stage.generates else None,
        )

    def begin_stage(self, stage: Stage) -> None:
        """A fresh optimizer for ``stage``."""
        self.groups["actor"].run(ModelWorker.begin_stage, optimizer_settings(stage))

    def publish(self) -> int:
        """Write the actor's weights, load and prove them on every server; the new version."""
        version = self.version + 1
        tp = self.recipe.roles.rollout.parallel.tp
        written = self.groups["actor"].run(ModelWorker.write_version, str(self._sync), version, tp)
        self._written, self.version = written, version
        self._load_everywhere(written, version)
        self.rollout.repair()
        self.rollout.require_engine()
        remove_versions(self._sync, keep=version)
        return version

    def _load_everywhere(self, written: WrittenVersion, version: int) -> None:
        """Each serving engine proves ``version``, or is quarantined; repaired ones need it too."""
        calls = {
            engine: in_background(
                f"publish-{engine.name}", partial(self._load, engine, written, version)
            )
            for engine in self.rollout.serving()
        }
        for engine, call in calls.items():
            try:
                self.last_publish = call.result()
            except (EngineFailed, ClusterError) as error:
                self.rollout.quarantine(engine.name, fault_of(error))
        self.rollout.version = version

    def _load(self, engine: RolloutEngine, written: WrittenVersion, version: int) -> PublishReport:
        return engine.run(RolloutWorker.publish, written.folder, version, written.checksum)

    def _repair(self, engine: RolloutEngine) -> int:
        """A new server, and the present version proven in it."""
        engine.restart()
        version = self.version
        if self._written is not None:
            self.last_publish = self._load(engine, self._written, version)
        return version

    def save(self, folder: Path) -> None:
        """The actor's state, to go on from."""
        self.groups["actor"].run(ModelWorker.save, str(folder))

    def load(self, folder: Path) -> None:
        """Go on from what ``save`` wrote."""
        self.groups["actor"].run(ModelWorker.load, str(folder))

    def export(self, folder: Path) -> None:
        """The actor in HuggingFace format."""
        self.groups["actor"].run(ModelWorker.save_pretrained, str(folder))

    def close(self) -> None:
        """Remove written versions, take no more requests; the session ends the workers."""
        if self.fleet is not None:
            self.fleet.close()
        shutil.rmtree(self._sync, ignore_errors=True)


def optimizer_settings(stage: Stage) -> OptimizerSettings:
    """The stage's optimizer section, with the number of its optimizer steps."""
    section: OptimizerSection = stage.optimizer
    return OptimizerSettings(
        lr=section.lr,
        betas=(section.betas[0], section.betas[1]),
        eps=section.eps,
        weight_decay=section.weight_decay,
        clip_grad=section.clip_grad,
        schedule=section.schedule,
        warmup_steps=section.warmup_steps,
        min_lr=section.min_lr,
        total_steps=stage.optimizer_steps,
    )


def _engines(recipe: Recipe, session: Session, pool: Pool | None) -> list[RolloutEngine]:
    """Every rollout engine, starting: one group each, on its own slots of the pool."""
    section = recipe.roles.rollout
    settings = {"server": _server(recipe)}

    def engine(index: int) -> RolloutEngine:
        name = "rollout" if section.parallel.dp == 1 else f"rollout-{index}"
        slot = index * section.parallel.tp
        return RolloutEngine(
            name,
            partial(session.group, name, RolloutWorker, 1, pool, settings, first_slot=slot),
            start_seconds=section.start_timeout_seconds,
            request_seconds=section.request_timeout_seconds,
        )

    return [engine(index) for index in range(section.parallel.dp)]


def _engine(recipe: Recipe, role: str, layout: ParallelLayout, stage: Stage) -> EngineConfig:
    trains = role == "actor"
    section = recipe.roles.actor if trains else recipe.roles.reference
    assert section is not None, f"model role without a section: {role}"
    return EngineConfig(
        model_path=recipe.model.path,
        layout=layout,
        dtype=getattr(torch, recipe.model.dtype),
        seed=recipe.seed,
        optimizer=optimizer_settings(stage) if trains else None,
        micro_batch_tokens=section.micro_batch_tokens,
    )


def _sync_directory(recipe: Recipe) -> Path:
    """A folder of this run's own, after those of killed runs of this host were removed."""
    parent = Path(recipe.roles.rollout.sync.directory)
    if not parent.is_dir():
        raise ValueError(
            f"roles.rollout.sync.directory: there is no folder {parent}; name one that every "
            "trainer and server can reach"
        )
    host = socket.gethostname()
    _remove_abandoned(parent, host)
    return Path(tempfile.mkdtemp(prefix=f"{SYNC_PREFIX}{host}-{os.getpid()}-", dir=parent))


def _remove_abandoned(parent: Path, host: str) -> None:
    """Remove this host's folders whose driver is gone."""
    for folder in parent.glob(f"{SYNC_PREFIX}{host}-*-*"):
        pid = folder.name.removeprefix(f"{SYNC_PREFIX}{host}-").split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _server(recipe: Recipe) -> ServerConfig:
    section = recipe.roles.rollout
    return ServerConfig(
        engine=section.engine,
        model_path=recipe.model.path,
        dtype=recipe.model.dtype,
        tp=section.parallel.tp,
        threads=section.threads,
        max_running_requests=section.max_running_requests,
        start_timeout=section.start_timeout_seconds,
        request_timeout=section.request_timeout_seconds,
        python=section.python,
    )
