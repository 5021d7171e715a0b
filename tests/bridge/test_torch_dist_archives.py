"""Chunks of torch_dist checkpoints that are not what torch.save writes of a tensor."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge.torch_dist.reader import TorchDist
from tests.bridge.chunks import HALVES, Attack, edit, moved, refuses, write_halves


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_halves(tmp_path / "checkpoint")


def _overwrite(folder: Path, content: bytes) -> None:
    """Put other bytes in the place of the first chunk."""
    (folder / "c.distcp").write_bytes(content)
    edit(folder, moved(HALVES[0], relative_path="c.distcp", offset=0, length=len(content)))


def _saved(thing: Any, folder: Path) -> bytes:
    torch.save(thing, folder / "thing")
    return (folder / "thing").read_bytes()


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        ({"a": torch.zeros(3, 4)}, "holds a dict, not a plain tensor"),
        (torch.zeros(3, 4).to_sparse(), "not a plain tensor"),
        (torch.nn.Parameter(torch.zeros(3, 4)), "not a plain tensor"),
        (Attack(Path("/nowhere")), "refused"),
    ],
)
def test_a_chunk_that_is_no_tensor(folder, tmp_path, thing, text):
    _overwrite(folder, _saved(thing, tmp_path))
    refuses(folder, "c.distcp", text)


def test_a_chunk_of_many_cuts(folder, tmp_path):
    content = _saved(torch.zeros(3, 4), tmp_path)
    for length in range(0, len(content) - 1, 50):
        _overwrite(folder, content[:length])
        refuses(folder, "c.distcp")


def test_a_compressed_chunk(folder, tmp_path):
    _saved(torch.zeros(3, 4), tmp_path)
    with (
        zipfile.ZipFile(tmp_path / "thing") as source,
        zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry.filename))
    _overwrite(folder, (tmp_path / "packed").read_bytes())
    refuses(folder, "c.distcp")


def test_a_tensor_that_reaches_beyond_its_data(folder, tmp_path):
    """An archive whose header says 12 elements and whose data are 3."""
    _saved(torch.zeros(3, 4), tmp_path)
    with zipfile.ZipFile(tmp_path / "thing") as large:
        header = large.read("thing/data.pkl")
    _saved(torch.zeros(3), tmp_path)
    with (
        zipfile.ZipFile(tmp_path / "thing") as source,
        zipfile.ZipFile(tmp_path / "made", "w") as target,
    ):
        for entry in source.infolist():
            own = header if entry.filename.endswith("data.pkl") else source.read(entry.filename)
            target.writestr(entry.filename, own)
    _overwrite(folder, (tmp_path / "made").read_bytes())
    refuses(folder, "c.distcp", "shorter than its tensor")


def test_chunks_alike_with_checksums(folder, tmp_path):
    """Archives that differ in their data, and so in the checksums behind it, are read apart."""
    content = [_saved(torch.full((3, 4), float(number)), tmp_path) for number in (1, 2)]
    assert len(content[0]) == len(content[1])
    (folder / "c.distcp").write_bytes(content[0] + content[1])
    for half, start in zip(HALVES, (0, len(content[0])), strict=True):
        edit(folder, moved(half, relative_path="c.distcp", offset=start, length=len(content[0])))
    read = TorchDist(folder).read("t", ((0, 6), (0, 4)))
    assert torch.equal(read, torch.tensor([1.0, 2.0]).repeat_interleave(3)[:, None].expand(6, 4))


@pytest.mark.parametrize("place", [slice(0, 4), slice(40, 90), slice(-60, None)])
def test_a_damaged_chunk_behind_one_like_it(folder, place):
    content = bytearray((folder / "b.distcp").read_bytes())
    content[place] = bytes(len(content[place]))
    (folder / "b.distcp").write_bytes(content)
    TorchDist(folder).read("t", ((0, 3), (0, 4)))
    refuses(folder, "b.distcp")
