"""A slot's layout, its reservation, and who may open it."""

import os
import resource
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from hybridflow.weight_sync.checksum import engine_digest, parameters_checksum
from hybridflow.weight_sync.slots import SlotLayout, create_slot, open_slot, slot_rank_digest
from megatron_bridge.reshard import TargetParameter

PARAMETERS = (
    TargetParameter("norm", (5,), ()),
    TargetParameter("router", (3, 2), (), dtype="float32"),
    TargetParameter("table", (7, 4), ()),
)


@pytest.fixture
def layout() -> SlotLayout:
    return SlotLayout(PARAMETERS, torch.bfloat16)


def test_parameters_lie_apart_and_aligned(layout: SlotLayout):
    assert [place.offset for place in layout.places] == [0, 64, 128]
    assert [place.bytes for place in layout.places] == [10, 24, 56]
    assert layout.bytes == 192
    assert layout.entries()[1] == ["router", "float32", [3, 2], 64]


def test_what_one_writes_another_reads(tmp_path: Path, layout: SlotLayout):
    writer = create_slot(tmp_path / "slot", layout)
    assert not any(writer.tensor(index).any() for index in range(3))
    values = {}
    for index, place in enumerate(layout.places):
        values[place.name] = torch.randn(place.shape).to(place.dtype)
        writer.tensor(index).copy_(values[place.name])
    reader = open_slot(tmp_path / "slot", layout)
    writer.close()
    for index, place in enumerate(layout.places):
        assert torch.equal(reader.tensor(index), values[place.name])
    assert engine_digest([slot_rank_digest(reader)]) == parameters_checksum([values])
    assert (tmp_path / "slot").stat().st_mode & 0o777 == 0o600


def test_a_slot_is_made_once(tmp_path: Path, layout: SlotLayout):
    create_slot(tmp_path / "slot", layout)
    with pytest.raises(ValueError, match="exists already"):
        create_slot(tmp_path / "slot", layout)


def test_a_cut_or_linked_slot_is_refused(tmp_path: Path, layout: SlotLayout):
    create_slot(tmp_path / "slot", layout)
    (tmp_path / "link").symlink_to(tmp_path / "slot")
    with pytest.raises(ValueError, match="cannot be opened"):
        open_slot(tmp_path / "link", layout)
    with pytest.raises(ValueError, match="cannot be opened"):
        open_slot(tmp_path / "absent", layout)
    os.truncate(tmp_path / "slot", 100)
    with pytest.raises(ValueError, match="has 100 bytes, not 192"):
        open_slot(tmp_path / "slot", layout)


def _without_room(path: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    layout = SlotLayout(PARAMETERS, torch.bfloat16)
    try:
        create_slot(path, layout)
    except ValueError as error:
        return str(error)
    return "it was made"


def test_too_little_room_is_an_error_at_once(tmp_path: Path):
    with get_context("spawn").Pool(1) as pool:
        told = pool.apply(_without_room, (tmp_path / "slot",))
    assert "has no room for the slot of 3 parameters" in told
    assert not (tmp_path / "slot").exists()
