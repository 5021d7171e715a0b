"""What both engines' loaders are asked, and faults that each must name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.rollout import RolloutClient, Sample, Sampling, Server, ServerConfig, start_server
from hybridflow.rollout.errors import LoadFailed
from hybridflow.weight_sync.checksum import engine_digest, rank_digest
from hybridflow.weight_sync.layout import server_parameters
from hybridflow.weight_sync.layout.build import build
from hybridflow.weight_sync.slots import Slot, SlotLayout, create_slot, slot_rank_digest
from tests.servers import TOKEN
from tests.tiny_models import make_model

PROMPTS = [[5, 17, 33], [40, 8, 9, 10, 11, 12, 13]]
GREEDY = Sampling(12, temperature=0.0)


@dataclass
class Shards:
    """A running server and slots that hold another checkpoint than the server's."""

    server: Server
    client: RolloutClient
    folder: Path
    model: Path
    other: Path
    slots: list[Slot]

    def controls(self) -> list[dict[str, Any]]:
        """The request that copies the slots."""
        return [
            {
                "operation": "standby",
                "slot": slot.path.name,
                "bytes": slot.layout.bytes,
                "parameters": slot.layout.entries(),
            }
            for slot in self.slots
        ]

    def digest(self) -> str:
        """The engine digest of the slots."""
        return engine_digest(map(slot_rank_digest, self.slots))

    def answers(self) -> list[list[Sample]]:
        """Greedy responses to `PROMPTS`."""
        return self.client.generate(PROMPTS, 1, GREEDY)

    def refused(self, controls: list[dict[str, Any]], what: str) -> LoadFailed:
        """The request fails by that reason, and the server goes on answering."""
        with pytest.raises(LoadFailed, match=what) as caught:
            self.client.load_through(self.folder, controls)
        assert self.client.health(timeout=60)
        return caught.value


def serve_shards(
    engine: str, tp: int, folder: Path, sync: Path, **changes: Any
) -> Iterator[Shards]:
    """A server of one tiny model and slots of another; ended afterwards."""
    model = make_model(folder / "model", **changes)
    other = make_model(folder / "other", seed=5, **changes)
    config = json.loads((other / "config.json").read_text())
    weights = load_file(other / "model.safetensors")
    slots = []
    for rank in range(tp):
        parameters = server_parameters(config, tp=tp, rank=rank)
        slot = create_slot(sync / f"slot-{rank}", SlotLayout(parameters, torch.float32))
        for index, parameter in enumerate(parameters):
            slot.tensor(index).copy_(build(parameter, weights, torch.float32))
        slots.append(slot)
    server = start_server(
        ServerConfig(
            engine,
            model,
            tp=tp,
            sync_folder=sync,
            log_path=folder / "server.log",
            start_timeout=400,
            request_timeout=120,
            token=TOKEN,
        )
    )
    try:
        yield Shards(server, server.client(), sync, model, other, slots)
    finally:
        server.stop()


def check_a_load(shards: Shards) -> None:
    """What comes through slots is bit for bit what comes from disk."""
    client = shards.client
    client.update_from_disk(shards.other)
    assert client.checksum() == shards.digest()
    want = shards.answers()
    client.update_from_disk(shards.model)
    assert client.checksum() != shards.digest()
    client.pause("retract")
    statuses = client.load_through(shards.folder, shards.controls())
    client.continue_()
    assert [status.rank for status in statuses] == list(range(len(shards.slots)))
    assert all(status.ok and status.touched for status in statuses)
    held = [sum(p.bytes for p in slot.layout.places) for slot in shards.slots]
    assert [status.bytes for status in statuses] == held
    assert client.checksum() == shards.digest()
    got = shards.answers()
    assert [[s.tokens for s in group] for group in got] == [[s.tokens for s in g] for g in want]
    assert [[s.logprobs for s in group] for group in got] == [[s.logprobs for s in g] for g in want]


def check_digests_and_names(shards: Shards) -> None:
    """The loader's own digest is the server's, and names are the layout's."""
    client, ranks = shards.client, range(len(shards.slots))
    hashed = client.load_through(shards.folder, [{"operation": "digest"} for _ in ranks])
    assert engine_digest(rank_digest(status.digests) for status in hashed) == client.checksum()
    assert not any(status.touched for status in hashed)
    named = client.load_through(shards.folder, [{"operation": "names"} for _ in ranks])
    for status, slot in zip(named, shards.slots, strict=True):
        listed = {(p.name, p.dtype_name, p.shape) for p in slot.layout.places}
        assert set(status.parameters) == listed


def check_requests_that_do_not_fit(shards: Shards) -> None:
    """Each fault of a request is named by its rank, before anything changes."""
    before = shards.client.checksum()
    last = len(shards.slots) - 1

    def wrong(change) -> list[dict[str, Any]]:
        controls = shards.controls()
        change(controls[last])
        return controls

    def named(**values: Any):
        return wrong(lambda control: control.update(values))

    entries = shards.slots[last].layout.entries()
    cases = {
        "is missing": named(parameters=entries[1:]),
        "no parameter of the server": named(parameters=[*entries, ["x", "float32", [1], 0]]),
        r"is bfloat16 .*the server's is float32": named(
            parameters=[[entries[0][0], "bfloat16", *entries[0][2:]], *entries[1:]]
        ),
        "listed twice": named(parameters=[*entries, entries[0]]),
        "outside the slot": named(parameters=[[*entries[0][:3], 1 << 40], *entries[1:]]),
        "no plain file name": named(slot="../slot-0"),
        "cannot be opened": named(slot="absent"),
        "unknown operation": named(operation="standbi"),
    }
    for what, controls in cases.items():
        error = shards.refused(controls, f"rank {last}: .*{what}")
        assert not any(s.touched for s in error.statuses if s.rank == last)
        if last == 0:
            assert not error.touched
    for slot in shards.slots[:last]:
        assert slot.path.exists()
    if last == 0:
        assert shards.client.checksum() == before


def check_hostile_files(shards: Shards) -> None:
    """A link, a folder and a slot cut short are refused."""
    controls, name = shards.controls(), shards.slots[-1].path
    (shards.folder / "link").symlink_to(name)
    (shards.folder / "folder").mkdir()
    (shards.folder / "short").write_bytes(b"\0" * 100)
    for file, what in [
        ("link", "cannot be opened"),
        ("folder", "cannot be opened"),
        ("short", "has 100 bytes"),
    ]:
        controls[-1]["slot"] = file
        shards.refused(controls, what)


def check_an_open_session(shards: Shards) -> None:
    """A session that a dead caller left open is closed by the next."""
    shards.client.begin_weight_update()
    shards.client.load_through(shards.folder, shards.controls())
    assert shards.client.checksum() == shards.digest()
