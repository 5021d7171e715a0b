"""Publishes the actor's weights to the rollout fleet, and brings failed engines back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow import owned
from hybridflow.cluster import ClusterError, WorkerGroup
from hybridflow.recipe.plan import Plan
from hybridflow.rollout.background import in_background
from hybridflow.rollout.engines import EngineFailed, EngineFault, EngineState, FleetEvent
from hybridflow.rollout.fleet import Fleet
from hybridflow.weight_sync.folders import own_folder
from hybridflow.weight_sync.inbox import Fault, PhaseReport
from hybridflow.weight_sync.publication import PublishReport, publish_to
from hybridflow.weight_sync.wiring import SyncSettings, Wiring, settings
from hybridflow.workers.model import ModelWorker
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_engine import GRACE_SECONDS, RolloutEngine

_PHASES_OF_A_DEADLINE = 3
"""A worker's phase is a few waits, each with the recipe's deadline."""


class Publisher:
    """Brings versions of the actor's weights to every engine.

    Args:
        note_version: keeps a version's number, before anything is sent under it.

    Attributes:
        version: the newest that was published; 0: the model's folder, with which servers start.
        last: what the last publication did.
    """

    def __init__(
        self,
        plan: Plan,
        actor: WorkerGroup,
        engines: list[RolloutEngine],
        on_event: Callable[[FleetEvent], None],
        note_version: Callable[[int], None],
    ) -> None:
        self.version = 0
        self._note_version = note_version
        self.last: PublishReport | None = None
        section = plan.recipe.roles.servers
        self._staleness = section.max_staleness
        self._actor, self._on_event = actor, on_event
        self.shared = own_folder(section.sync.directory)
        self._sync: SyncSettings = settings(plan, str(self.shared))
        self._wiring = _wiring(plan, actor, engines, self._sync)
        self._links = {
            engine.name: _Link(number, engine, self._sync.seconds)
            for number, engine in enumerate(engines)
        }
        self._held = dict.fromkeys(self._links, 0)
        self._moved = False
        # A version on disk that is written anew must have no other reader meanwhile.
        self._sending_again = threading.Lock()
        actor.run(ModelWorker.connect, self._wiring)
        for link in self._links.values():
            link.connect(self._wiring)
        self.fleet: Fleet[RolloutEngine] = Fleet(
            engines,
            self._repair,
            request_seconds=section.request_timeout_seconds + 2 * GRACE_SECONDS,
            repair_seconds=section.start_timeout_seconds + section.repair_seconds,
            on_event=on_event,
        )
        if self._sync.transport == "direct":
            try:
                self._prove_layout()
            except BaseException:
                self.close()
                raise

    def _prove_layout(self) -> None:
        """What servers loaded from the model's folder is what the plan makes of the actor's shards.

        Raises:
            ValueError: it is not, or an engine cannot take weights; says why for each.
        """
        links, overlaps = list(self._links.values()), self._sync.overlaps
        loaded = {link.engine: link.phase("digest", 0).result() for link in links}
        report = publish_to(links, self._send, 0, overlaps=overlaps, loads=not overlaps)
        faults = {e: before.fault for e, before in loaded.items() if before.fault is not None}
        faults |= {**report.failed, **report.behind}
        for engine, digest in report.checksums.items():
            if digest != loaded[engine].result:
                faults[engine] = Fault("its parameters are others than those it loaded")
        if faults:
            lines = [f"- engine {engine}: {fault}" for engine, fault in sorted(faults.items())]
            raise ValueError(
                "before the first step each server must be shown to hold the actor's weights in "
                "its own layout; these were not:\n" + "\n".join(lines)
            )

    def actor_moved(self) -> None:
        """The actor's weights are no longer those of ``version``."""
        self._moved = True

    def publish(self) -> int:
        """Bring the actor's weights to every engine as the next version; that version.

        An engine that does not come to hold it is repaired at once, else quarantined; it goes on
        with the version before where that is proven and the recipe allows such staleness.

        Raises:
            FleetError: no engine is left.
        """
        version = self.version + 1
        serving = [self._links[engine.name] for engine in self.fleet.serving()]
        self._note_version(version)
        self.version, self._moved = version, False
        report = publish_to(serving, self._send, version, overlaps=self._sync.overlaps)
        self.last = report
        self._take(report, serving)
        self.fleet.version = version
        self.fleet.repair()
        self.fleet.require_engine()
        return version

    def _take(self, report: PublishReport, links: list[_Link]) -> None:
        """Note who holds what; quarantine who may not serve."""
        for link in links:
            name = link.name
            fault = report.failed.get(link.engine) or report.behind.get(link.engine)
            if fault is None:
                self._held[name] = report.version
                if first := report.mended.get(link.engine):
                    text = f"{name}: version {report.version} at the second try: {first.reason}"
                    self._on_event(FleetEvent("repair", name, text, first.log))
            elif (
                link.engine in report.behind
                and report.version - self._held[name] <= self._staleness
            ):
                text = f"{name} goes on with version {self._held[name]}: {fault.reason}"
                self._on_event(FleetEvent("behind", name, text, fault.log))
            else:
                self.fleet.quarantine(name, EngineFault(fault.reason, fault.log))

    def _send(self, endpoints: Mapping[int, Any], version: int) -> Any:
        seconds = _PHASES_OF_A_DEADLINE * self._sync.seconds + GRACE_SECONDS
        return self._actor.run(ModelWorker.send, endpoints, version, timeout=seconds)

    def _repair(self, engine: RolloutEngine) -> int:
        """A new server with the present version, proven: from the engine's own standby where that
        survived, else sent again."""
        version, link = self.version, self._links[engine.name]
        new_worker = engine.restart()
        if version == 0:
            if new_worker:
                link.connect(self._wiring)
            return 0
        fault = None
        if new_worker:
            link.connect(self._wiring)
        else:
            fault = link.phase("restore", version).result().fault
            if fault is None:
                fault = link.phase("resume", version).result().fault
                if fault is None:
                    self._held[engine.name] = version
                    return version
        if self._moved:
            why = fault.reason if fault else "its worker is new"
            raise EngineFailed(
                engine.name,
                EngineFault(f"it takes part again with the next publication ({why})"),
            )
        with self._sending_again:
            report = publish_to([link], self._send, version, overlaps=self._sync.overlaps)
        for fault in (*report.failed.values(), *report.behind.values()):
            raise EngineFailed(engine.name, EngineFault(fault.reason, fault.log))
        self._held[engine.name] = version
        return version

    def states(self) -> dict[str, EngineState]:
        """Every engine's state by its name."""
        return self.fleet.states()

    def close(self) -> None:
        """Take no more requests, and remove what was written."""
        self.fleet.close()
        owned.remove(self.shared)


class _Link:
    """One engine's phases, through its worker group."""

    def __init__(self, number: int, engine: RolloutEngine, seconds: float) -> None:
        self.engine, self.name = number, engine.name
        self._group = engine
        self._seconds = _PHASES_OF_A_DEADLINE * seconds + GRACE_SECONDS

    def connect(self, wiring: Wiring) -> None:
        """Tell the worker about ``wiring``."""
        self._group.group.run(RolloutWorker.connect, wiring, self.engine)

    def phase(self, name: str, version: int, *args: Any) -> Future[PhaseReport]:
        """See ``EngineLink.phase``."""
        act = partial(self._phase, name, version, *args)
        return in_background(f"{name}-{self.name}", act)

    def _phase(self, name: str, version: int, *args: Any) -> PhaseReport:
        try:
            return self._group.group.run(
                RolloutWorker.publication, name, version, *args, timeout=self._seconds
            )
        except ClusterError as error:
            reason, _, more = str(error).partition("\n")
            return PhaseReport(self.engine, version, Fault(f"{name}: {reason}", more))


def _wiring(
    plan: Plan, actor: WorkerGroup, engines: list[RolloutEngine], sync: SyncSettings
) -> Wiring:
    recipe = plan.recipe
    servers = recipe.roles.servers.parallel
    return Wiring(
        model_path=str(Path(recipe.model.path).resolve()),
        layout=plan.layouts["actor"],
        dtype=recipe.model.dtype,
        tp=servers.tp,
        ep=servers.ep,
        device=engines[0].group.run(RolloutWorker.device_kind),
        trainer=tuple(actor.run(ModelWorker.seat)),
        engines=tuple(engine.group.run(RolloutWorker.seats) for engine in engines),
        sync=sync,
    )
