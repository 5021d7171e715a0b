"""A delta that is not whole, or not of its base, is refused; a crash leaves no half version."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hybridflow.weight_sync.delta import NeedsFull, VersionWriter, apply_deltas, whole_version
from hybridflow.weight_sync.delta_manifest import DATA, MANIFEST, WEIGHTS
from tests.tiny_models import make_model
from tests.weight_sync.delta_cases import Weights, read_weights, same_bits, stepped


def _edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _swap_blocks(folder: Path) -> None:
    def change(content) -> None:
        first, second = list(content["tensors"].values())[:2]
        for key in ("begin", "blocks"):
            first[key], second[key] = second[key], first[key]

    _edit(folder / MANIFEST, change)


def _claim_other_result(folder: Path) -> None:
    _edit(folder / MANIFEST, lambda c: next(iter(c["tensors"].values())).update(result="0" * 64))


FAULTS = {
    "data cut off": (lambda v1, v2, v3: _truncate(v3 / DATA), "bytes"),
    "data missing": (lambda v1, v2, v3: (v3 / DATA).unlink(), "damaged"),
    "data changed": (lambda v1, v2, v3: _flip(v3 / DATA), "block|digest"),
    "manifest cut off": (lambda v1, v2, v3: _truncate(v3 / MANIFEST), "damaged"),
    "another format": (
        lambda v1, v2, v3: _edit(v3 / MANIFEST, lambda c: c.update(format=9)),
        "format 9",
    ),
    "blocks reordered": (lambda v1, v2, v3: _swap_blocks(v3), "block|digest|other tensors"),
    "digest claimed": (lambda v1, v2, v3: _claim_other_result(v3), "its digest of the result"),
    "a link missing": (lambda v1, v2, v3: shutil.rmtree(v2), "is missing"),
    "the full one missing": (lambda v1, v2, v3: shutil.rmtree(v1), "is missing"),
    "deltas swapped": (lambda v1, v2, v3: _exchange(v2, v3), "goes from version"),
    "the full one changed": (lambda v1, v2, v3: _flip(v1 / WEIGHTS), "starts from"),
    "the full one cut off": (lambda v1, v2, v3: _truncate(v1 / WEIGHTS), "base is damaged"),
}


def _exchange(first: Path, second: Path) -> None:
    first.rename(first.with_name("x"))
    second.rename(first)
    first.with_name("x").rename(second)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_delta_asks_for_a_full_version(
    three: list[Weights], shared: Path, local: Path, fault: str
):
    damage, text = FAULTS[fault]
    damage(*(shared / f"v{version}" for version in (1, 2, 3)))
    with pytest.raises(NeedsFull, match=text) as caught:
        whole_version(shared, 3, local)
    assert caught.value.version == 3 and "Write a full version" in str(caught.value)
    assert not local.exists() or list(local.iterdir()) == []


def test_a_foreign_delta_is_refused(
    three: list[Weights], source: Path, shared: Path, tmp_path: Path
):
    """Of the same model and version numbers, but of another run, or of another model."""
    other = VersionWriter(tmp_path / "other", source, tmp_path)
    for version in (1, 2, 3):
        other.write(stepped(three[0], 7 * version).items(), version)
    other.close()
    foreign = tmp_path / "other"
    with pytest.raises(NeedsFull, match="not what the delta starts from"):
        apply_deltas(shared / "v1", [foreign / "v2"], tmp_path / "out")
    with pytest.raises(NeedsFull, match="starts from another version"):
        apply_deltas(shared / "v1", [shared / "v2", foreign / "v3"], tmp_path / "out")
    wide = make_model(tmp_path / "wide", hidden_size=64)
    with pytest.raises(NeedsFull, match="holds other tensors"):
        apply_deltas(wide, [shared / "v2"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_write_leaves_nothing_and_a_full_version_follows(
    three: list[Weights], writer: VersionWriter, shared: Path
):
    pairs = list(three[2].items())
    with pytest.raises(ValueError, match="1 weights are missing"):
        writer.write(pairs[1:], 4)
    assert not (shared / "v4").exists() and len(list(shared.iterdir())) == 3
    assert (writer.write(pairs, 4) / WEIGHTS).is_file()
    with pytest.raises(ValueError, match="not newer than version 4"):
        writer.write(pairs, 3)
    with pytest.raises(ValueError, match="holds one dtype"):
        writer.write(pairs, 5)
        writer.write([(name, tensor.bfloat16()) for name, tensor in pairs], 6)


@contextmanager
def _small_files(most: int) -> Iterator[None]:
    """The system refuses to let any file of this process grow beyond ``most`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named(
    three: list[Weights], writer: VersionWriter, shared: Path, local: Path
):
    noise = [(name, torch.randn(tensor.shape)) for name, tensor in three[2].items()]
    with (
        pytest.raises(ValueError, match="shared: no space for the delta of version 4"),
        _small_files(30_000),
    ):
        writer.write(noise, 4)
    assert sorted(path.name for path in shared.iterdir()) == ["v1", "v2", "v3"]
    with (
        pytest.raises(ValueError, match="local: no space for version 3"),
        _small_files(30_000),
    ):
        whole_version(shared, 3, local)
    assert list(local.iterdir()) == []


_KILLED = """
import os, sys
from pathlib import Path
from safetensors.torch import load_file
from hybridflow.weight_sync.delta import VersionWriter
source, shared = map(Path, sys.argv[1:])
weights = list(load_file(source / "model.safetensors").items())
writer = VersionWriter(shared, source, shared.parent)
writer.write(weights, 1)
def dying():
    for number, (name, tensor) in enumerate(weights):
        if number == 20:
            os.kill(os.getpid(), 9)
        yield name, tensor + 1
writer.write(dying(), 2)
"""


def test_a_killed_writer_leaves_no_version(source: Path, shared: Path, local: Path):
    before = set(shared.parent.iterdir())
    command = [sys.executable, "-c", _KILLED, str(source), str(shared)]
    assert subprocess.run(command, timeout=240, check=False).returncode == -9
    assert [path.name for path in shared.glob("v*")] == ["v1"]
    with pytest.raises(NeedsFull, match="v2, which it needs, is missing"):
        whole_version(shared, 2, local)
    assert set(shared.parent.iterdir()) - before == {shared}, "the writer's copy went with it"


@pytest.mark.parametrize("after", [0, 1, 20, 35])
def test_an_interrupted_write_leaves_nothing(
    three: list[Weights], writer: VersionWriter, shared: Path, local: Path, after: int
):
    pairs = list(three[0].items())
    assert len(pairs) == 36

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield from pairs[:after]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write(interrupted(), 4)
    assert sorted(path.name for path in shared.iterdir()) == ["v1", "v2", "v3"]
    assert same_bits(read_weights(whole_version(shared, 3, local)), three[2])
    assert (writer.write(pairs, 4) / WEIGHTS).is_file(), "the copy is part old, part new"


def test_a_full_version_takes_the_place_of_a_delta(
    three: list[Weights], writer: VersionWriter, shared: Path, local: Path
):
    _flip(shared / "v2" / DATA)
    (local / ".v3.1234").mkdir(parents=True)
    with pytest.raises(NeedsFull):
        whole_version(shared, 3, local)
    assert list(local.iterdir()) == [], "what a killed reader left goes too"
    assert writer.write(three[2].items(), 3, full=True) == whole_version(shared, 3, local)
    assert same_bits(read_weights(shared / "v3"), three[2])
    writer.write(three[0].items(), 4)
    assert same_bits(read_weights(whole_version(shared, 4, local)), three[0])
