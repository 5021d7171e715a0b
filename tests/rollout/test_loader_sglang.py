"""Shards into a real SGLang server of two ranks: the loader runs inside both."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megatron_bridge.layout import ParallelLayout
from tests.rollout import direct_cases as direct
from tests.rollout import loader_cases as cases
from tests.rollout.sync_matrix import WAYS, Served, check_way
from tests.weight_sync.trainer import Trainer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cases.Shards]:
    sync = tmp_path_factory.mktemp("sync")
    yield from cases.serve_shards("sglang", 2, tmp_path_factory.mktemp("sglang"), sync)


def test_a_slot_is_as_good_as_disk(shards: cases.Shards):
    cases.check_a_load(shards)


@pytest.mark.slow
def test_digests_and_names(shards: cases.Shards):
    cases.check_digests_and_names(shards)


@pytest.mark.slow
def test_requests_that_do_not_fit(shards: cases.Shards):
    cases.check_requests_that_do_not_fit(shards)


@pytest.mark.slow
def test_files_that_are_no_slots(shards: cases.Shards):
    cases.check_hostile_files(shards)


@pytest.mark.slow
def test_a_session_left_open(shards: cases.Shards):
    cases.check_an_open_session(shards)


def test_swapped_ranks_do_not_match(shards: cases.Shards):
    """Both slots fit either rank: only the digests tell."""
    one, other = shards.controls()
    one["slot"], other["slot"] = other["slot"], one["slot"]
    shards.client.load_through(shards.folder, [one, other])
    assert shards.client.checksum() != shards.digest()
    shards.client.load_through(shards.folder, shards.controls())
    assert shards.client.checksum() == shards.digest()


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("standby", direct.LAYOUTS[0]),
        ("bucketed", direct.LAYOUTS[1]),
        pytest.param("standby", direct.LAYOUTS[1], marks=pytest.mark.slow),
        pytest.param("bucketed", direct.LAYOUTS[0], marks=pytest.mark.slow),
    ],
)
def test_a_trainers_shards_are_as_good_as_disk(shards: cases.Shards, layout, mode: str):
    direct.check_publications(shards, layout, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["standby", "bucketed"])
def test_shards_of_another_host(shards: cases.Shards, mode: str):
    direct.check_publications(shards, direct.LAYOUTS[0], mode, elsewhere=(1, 2, 5))


@pytest.mark.slow
def test_a_wrong_byte_in_a_slot(shards: cases.Shards):
    direct.check_a_wrong_byte_in_a_slot(shards)


@pytest.mark.slow
def test_a_server_that_holds_something_else(shards: cases.Shards):
    direct.check_a_server_that_holds_something_else(shards)


@pytest.mark.slow
def test_a_sender_that_comes_late(shards: cases.Shards):
    direct.check_a_late_sender(shards, 10.0)


@pytest.mark.slow
def test_a_sender_that_never_comes(shards: cases.Shards):
    direct.check_a_sender_that_never_comes(shards)


@pytest.mark.slow
def test_a_wrong_byte_in_a_bucket(shards: cases.Shards):
    direct.check_a_wrong_byte_in_a_bucket(shards)


@pytest.fixture(scope="module")
def trainer(shards: cases.Shards) -> Iterator[Trainer]:
    layout = ParallelLayout(tp=2, pp=2, last_stage_layers=1)
    with closing(Trainer(shards.model, layout)) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if "disk" in way else ()) for way in WAYS]
)
def test_what_live_ranks_publish_is_as_good_as_disk(
    shards: cases.Shards, trainer: Trainer, way: str, tmp_path: Path
):
    check_way(trainer, Served(shards.client, shards.folder, 2), way, tmp_path)
