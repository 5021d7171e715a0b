"""Shards into the local engine through the loader that SGLang runs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridflow.rollout import RolloutError, ServerConfig, start_server
from hybridflow.rollout.errors import LoadFailed
from hybridflow.rollout.server_side.loader_standby import read_into
from hybridflow.rollout.server_side.sync_files import LOADER, LoadFault
from tests.rollout import direct_cases as direct
from tests.rollout import loader_cases as cases


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cases.Shards]:
    sync = tmp_path_factory.mktemp("sync")
    yield from cases.serve_shards("local", 1, tmp_path_factory.mktemp("local"), sync)


def test_a_slot_is_as_good_as_disk(shards: cases.Shards):
    cases.check_a_load(shards)


def test_digests_and_names(shards: cases.Shards):
    cases.check_digests_and_names(shards)


def test_requests_that_do_not_fit(shards: cases.Shards):
    cases.check_requests_that_do_not_fit(shards)


def test_files_that_are_no_slots(shards: cases.Shards):
    cases.check_hostile_files(shards)


def test_a_session_left_open(shards: cases.Shards):
    cases.check_an_open_session(shards)


def test_a_slot_cut_short_while_it_is_copied(tmp_path: Path):
    """The size is checked first; what ends early all the same is an error and no SIGBUS."""
    (tmp_path / "slot").write_bytes(b"1" * 100)
    target = torch.zeros(64, dtype=torch.uint8)
    with (tmp_path / "slot").open("rb") as file:
        read_into(file.fileno(), target, 36)
        assert target.eq(ord("1")).all()
        with pytest.raises(LoadFault, match="ended at byte 100"):
            read_into(file.fileno(), target, 40)


def test_weights_come_within_a_session(shards: cases.Shards):
    call = shards.client._call
    body = {"load_format": LOADER, "control": ["{}"]}
    with pytest.raises(RolloutError, match="must come between"):
        call("POST", "/update_weights_from_tensor", body)
    with pytest.raises(RolloutError, match="no weight-update session is open"):
        shards.client.end_weight_update()
    shards.client.begin_weight_update()
    with pytest.raises(RolloutError, match="load_format"):
        call("POST", "/update_weights_from_tensor", {**body, "load_format": "direct"})
    with pytest.raises(RolloutError, match="one JSON text"):
        call("POST", "/update_weights_from_tensor", {**body, "control": ["{}", "{}"]})
    shards.client.end_weight_update()


@pytest.mark.parametrize("control", ["{", "[]", json.dumps({"status": "../x", "nonce": "1"})])
def test_a_request_without_a_place_for_its_status(shards: cases.Shards, control: str):
    shards.client.begin_weight_update()
    body = {"load_format": LOADER, "control": [control]}
    shards.client._call("POST", "/update_weights_from_tensor", body)
    shards.client.end_weight_update()
    assert "without a place for its status" in shards.server.log_tail()
    assert not (shards.folder.parent / "x").exists()
    assert shards.client.health(timeout=60)


def test_no_sync_folder_no_shards(shards: cases.Shards, tmp_path: Path):
    with pytest.raises(ValueError, match="sync_folder .* is no folder"):
        ServerConfig("local", shards.model, sync_folder=tmp_path / "absent")
    server = start_server(ServerConfig("local", shards.model, log_path=tmp_path / "log"))
    try:
        with pytest.raises(LoadFailed, match="wrote no status"):
            server.client().load_through(shards.folder, shards.controls())
        assert "without a sync folder" in server.log_tail()
    finally:
        server.stop()


@pytest.mark.parametrize("layout", direct.LAYOUTS, ids=str)
@pytest.mark.parametrize("mode", ["standby", "bucketed"])
def test_a_trainers_shards_are_as_good_as_disk(shards: cases.Shards, layout, mode: str):
    direct.check_publications(shards, layout, mode)


@pytest.mark.parametrize("mode", ["standby", "bucketed"])
def test_shards_of_another_host(shards: cases.Shards, mode: str):
    direct.check_publications(shards, direct.LAYOUTS[0], mode, elsewhere=(1, 2, 5))


def test_a_wrong_byte_in_a_slot(shards: cases.Shards):
    direct.check_a_wrong_byte_in_a_slot(shards)


def test_a_server_that_holds_something_else(shards: cases.Shards):
    direct.check_a_server_that_holds_something_else(shards)


def test_a_sender_that_comes_late(shards: cases.Shards):
    direct.check_a_late_sender(shards, 3.0)


def test_a_sender_that_never_comes(shards: cases.Shards):
    direct.check_a_sender_that_never_comes(shards)


def test_a_wrong_byte_in_a_bucket(shards: cases.Shards):
    direct.check_a_wrong_byte_in_a_bucket(shards)


def test_tensors_that_do_not_fit(shards: cases.Shards):
    direct.check_tensors_that_do_not_fit(shards)
