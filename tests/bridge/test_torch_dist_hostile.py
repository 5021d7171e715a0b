"""Damaged, incomplete and malicious torch_dist checkpoints: one clear error each, nothing run."""

import json
import os
import random
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron_bridge.source import whole
from megatron_bridge.torch_dist.reader import TorchDist
from tests.bridge.chunks import HALVES, Attack, edit, moved, refuses, write_halves


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_halves(tmp_path / "checkpoint")


def test_a_malicious_metadata_does_not_run(folder, tmp_path):
    trace = tmp_path / "it ran"
    edit(folder, lambda metadata: setattr(metadata, "planner_data", Attack(trace)))
    refuses(folder, "is refused", "posix.system", "a source that you trust")
    assert not trace.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cbuiltins\neval\n(S'1/0'\ntR.",
        b"cbuiltins\ngetattr\n.",
        b"ctorch.hub\nload\n.",
        b"ctorch\nload\n.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n.",
        b"ctorch.distributed.checkpoint.metadata\ntorch\n.",
        # Sets an attribute of a class that is allowed.
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}S'x'\nI1\ns\x86b.",
        b"\x80\x04" + b"\x82\x01.",
        b"P1\n.",
    ],
)
def test_nothing_but_records_is_built(folder, program):
    (folder / ".metadata").write_bytes(program)
    refuses(folder, ".metadata")


def test_a_class_that_a_file_changes_is_its_own(folder):
    """Two files share nothing: what one does to a class, the next does not see."""
    program = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)R}S'k'\nI1\nsb."
    (folder / ".metadata").write_bytes(program)
    refuses(folder, "lists no tensors")


@pytest.mark.parametrize(
    ("make", "name"), [(Attack, "posix.system"), (lambda _: Fraction(1, 3), "fractions.Fraction")]
)
def test_a_common_file_with_classes_is_refused(folder, make, name, tmp_path):
    trace = tmp_path / "it ran"
    torch.save({"args": make(trace)}, folder / "common.pt")
    with pytest.raises(ValueError, match=rf"common\.pt is refused .*: it names {name}, which"):
        TorchDist(folder).common()
    assert not trace.exists()
    TorchDist(folder).read("t", ((0, 6), (0, 4)))


def test_a_damaged_common_file(folder):
    path = folder / "common.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="common"):
        TorchDist(folder).common()
    path.unlink()
    with pytest.raises(ValueError, match="missing"):
        TorchDist(folder).common()


def test_every_cut_of_the_metadata_is_an_error(folder):
    path = folder / ".metadata"
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        refuses(folder, str(path))
    path.unlink()
    refuses(folder, "missing")


@pytest.mark.parametrize("path", ["../b.distcp", "/etc/passwd", "..", "x/b.distcp", "b\0.distcp"])
def test_a_place_outside_the_folder(folder, path):
    edit(folder, moved(HALVES[1], relative_path=path))
    refuses(folder, "is refused", "not a file of this folder", "'t' at [3, 0]")


def test_missing_and_truncated_files_are_named_together(folder):
    (folder / "a.distcp").unlink()
    os.truncate(folder / "b.distcp", 700)
    refuses(folder, "a.distcp is missing", "b.distcp has 700 bytes")


OTHER = MetadataIndex("u", (0,))


def _swap(metadata: Any) -> None:
    data = metadata.storage_data
    data[HALVES[0]], data[OTHER] = data[OTHER], data[HALVES[0]]


def _alias(metadata: Any) -> None:
    metadata.storage_data[HALVES[1]] = metadata.storage_data[HALVES[0]]


def _shift(rows: int) -> Callable[[Any], None]:
    """The second half begins some rows later or sooner than it should."""

    def change(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["t"].chunks
        chunks[1] = ChunkStorageMetadata(torch.Size((3 + rows, 0)), torch.Size((3 - rows, 4)))
        data = metadata.storage_data
        data[MetadataIndex("t", (3 + rows, 0))] = data.pop(HALVES[1])

    return change


def _bfloat16(metadata: Any) -> None:
    metadata.state_dict_metadata["t"].properties.dtype = torch.bfloat16


CHANGES: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "hole": (_shift(1), ("'t'", "no chunk covers element [3, 0]")),
    "overlap": (_shift(-1), ("'t'", "2 chunks cover element [2, 0]")),
    "outside": (
        lambda m: setattr(m.state_dict_metadata["t"], "size", torch.Size((5, 4))),
        ("'t'", "[3:6, 0:4] of a chunk is not inside [5, 4]"),
    ),
    "dtype": (_bfloat16, ("a.distcp", "torch.float32 [3, 4]", "torch.bfloat16 [3, 4]")),
    "another chunk": (_swap, ("it is torch.float32 [5]", "torch.float32 [3, 4]")),
    "the same bytes": (_alias, ("chunks of 't' and 't' lie in the same bytes of a.distcp",)),
    "no place": (lambda m: m.storage_data.pop(HALVES[1]), ("'t' at [3, 0] has no place",)),
    "shifted": (moved(HALVES[0], offset=8), ("a.distcp", "do not begin")),
    "short": (moved(HALVES[0], length=700), ("a.distcp, bytes 0 to 700",)),
    "negative": (moved(HALVES[0], offset=-64), ("not a file, a start and a length",)),
    "text": (moved(HALVES[0], offset="0"), ("not a file, a start and a length",)),
    "huge": (moved(HALVES[1], length=2**62), ("b.distcp has",)),
    "transformed": (moved(HALVES[0], transform_descriptors=["zstd"]), ("zstd", "without")),
    "no chunks": (
        lambda m: m.state_dict_metadata["t"].chunks.clear(),
        ("no chunk covers element [0, 0]",),
    ),
    "no tensors": (lambda m: setattr(m, "state_dict_metadata", None), ("lists no tensors",)),
    "wrong class": (
        lambda m: m.state_dict_metadata.update(t=m.storage_data[HALVES[0]]),
        ("not described by a TensorStorageMetadata",),
    ),
    "no dtype": (
        lambda m: setattr(m.state_dict_metadata["t"], "properties", None),
        ("'t' has no dtype",),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_is_wrong(folder, name):
    change, texts = CHANGES[name]
    edit(folder, change)
    refuses(folder, *texts)


def test_the_other_tensor_of_a_damaged_checkpoint_is_read(folder):
    edit(folder, CHANGES["hole"][0])
    source = TorchDist(folder)
    source.check(["u"])
    assert source.read("u", ((1, 3),)).tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("file", [".metadata", "a.distcp", "common.pt"])
def test_changed_bytes_are_data_or_an_error(folder, file):
    """Whatever three bytes become, reading goes through or raises a ValueError."""
    content = (folder / file).read_bytes()
    draw = random.Random(file)
    refused = 0
    for _ in range(150):
        changed = bytearray(content)
        for _ in range(3):
            changed[draw.randrange(len(content))] = draw.choice([0, 255, draw.randrange(256)])
        (folder / file).write_bytes(changed)
        try:
            source = TorchDist(folder)
            source.check()
            for name, info in source.tensors().items():
                source.read(name, whole(info.shape)).sum()
            source.common()
        except ValueError:
            refused += 1
    assert refused > 30


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"sharded_backend": "zarr", "sharded_backend_version": 1}, "--dist-ckpt-format"),
        ({"sharded_backend": "torch_dist", "sharded_backend_version": 2}, "version 2"),
        ({"model": "another kind of file"}, "is not a Megatron torch_dist checkpoint"),
    ],
)
def test_another_kind_of_checkpoint(folder, config, text):
    (folder / "metadata.json").write_text(json.dumps(config))
    refuses(folder, text)


def test_a_rectangle_or_a_tensor_that_is_not_there(folder):
    source = TorchDist(folder)
    with pytest.raises(ValueError, match=r"\[0:7, 0:4\] of 't' is not inside \[6, 4\]"):
        source.read("t", ((0, 7), (0, 4)))
    with pytest.raises(ValueError, match="has no tensor 'v'"):
        source.read("v", ())


def test_a_compressed_common_file_is_refused(folder):
    """It could unpack to more than the memory holds."""
    path = folder / "common.pt"
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    with pytest.raises(ValueError, match="is compressed"):
        TorchDist(folder).common()
