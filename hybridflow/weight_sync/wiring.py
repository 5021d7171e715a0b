"""Who publishes to whom: what every process needs to compute the same plan. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridflow.recipe import placement
from hybridflow.recipe.plan import Plan
from hybridflow.weight_sync.layout import server_parameters
from megatron_bridge import reshard, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard import Seat


@dataclass(frozen=True)
class SyncSettings:
    """How weights travel; see the recipe's ``roles.rollout.sync``.

    Attributes:
        bucket: most bytes of one bucket.
        seconds: deadline of each phase.
        directory: this run's own folder, on each host.
    """

    transport: str
    mode: str
    bucket: int
    pause: str
    full_every: int | None
    seconds: float
    directory: str

    @property
    def overlaps(self) -> bool:
        """Whether bytes arrive beside servers that go on."""
        return self.transport == "disk" or (self.transport == "direct" and self.mode == "standby")


@dataclass(frozen=True)
class Wiring:
    """The two sides of a publication.

    Attributes:
        model_path: HuggingFace folder whose config both sides read.
        layout: the trainer's.
        dtype: of the model on both sides.
        tp, ep: of each engine.
        device: kind of the engines' devices, "cpu" or "cuda".
        trainer: where each trainer rank runs.
        engines: where each rank of each engine runs.
    """

    model_path: str
    layout: ParallelLayout
    dtype: str
    tp: int
    ep: int
    device: str
    trainer: tuple[Seat, ...]
    engines: tuple[tuple[Seat, ...], ...]
    sync: SyncSettings

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json, resolved."""
        return translation.resolve(
            json.loads((Path(self.model_path) / "config.json").read_text(encoding="utf-8"))
        )

    @cached_property
    def plan(self) -> reshard.ReshardPlan:
        """Every copy that one engine needs."""
        targets = [
            server_parameters(self.config, tp=self.tp, ep=self.ep, rank=rank, device=self.device)
            for rank in range(self.tp)
        ]
        return reshard.plan(self.config, self.layout, targets, dtype=self.dtype)

    @cached_property
    def routes(self) -> reshard.Routes:
        """Who sends each copy."""
        return reshard.route(self.plan, self.trainer, self.engines)

    def sources(self, engine: int) -> frozenset[int]:
        """Trainer ranks that send to an engine."""
        ranks = range(len(self.engines[engine]))
        return frozenset(s for rank in ranks for s in self.routes.receives(engine, rank))


def planned(plan: Plan, device: str = "cuda", sync: SyncSettings | None = None) -> Wiring:
    """The wiring that a run of a recipe's plan has, on equal hosts.

    Servers that are larger than a host, which no run starts, take neighbours.
    """
    recipe = plan.recipe
    per_host = recipe.cluster.devices_per_node
    pools = placement.packed(
        (pool.devices for pool in plan.pools.values()), recipe.cluster.nodes, per_host
    )
    places = dict(zip(plan.pools, pools, strict=True))

    def seats(role: str) -> tuple[Seat, ...]:
        pool = plan.pool_of(role)
        assert pool is not None, f"a role without devices: {role}"
        return tuple(Seat(f"host {host}", device) for host, device in places[pool.name])

    layout, servers = plan.layouts["actor"], recipe.roles.servers.parallel
    slots = seats("rollout")
    hosts = [seat.host for seat in slots] if servers.tp <= per_host else [None] * len(slots)
    engines = placement.engine_slots(hosts, servers.tp, servers.dp, plan.trainer_beside_rollout)
    return Wiring(
        model_path=recipe.model.path,
        layout=layout,
        dtype=recipe.model.dtype,
        tp=servers.tp,
        ep=servers.ep,
        device=device,
        trainer=seats("actor")[: layout.world],
        engines=tuple(tuple(slots[slot] for slot in engine) for engine in engines),
        sync=sync or settings(plan, recipe.roles.servers.sync.directory),
    )


def settings(plan: Plan, directory: str) -> SyncSettings:
    """The recipe's settings, for a run whose own folder is ``directory``."""
    section = plan.recipe.roles.servers.sync
    return SyncSettings(
        transport=section.transport,
        mode=section.mode or "standby",
        bucket=section.bucket_bytes,
        pause=section.pause,
        full_every=section.full_every,
        seconds=section.timeout_seconds,
        directory=directory,
    )
