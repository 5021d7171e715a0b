"""Deltas are bit-exact, small when little changed, and refused when they are not whole."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hybridflow.rollout import Sampling
from hybridflow.weight_sync import publish, remove_versions, server_checksum
from hybridflow.weight_sync.delta import (
    NeedsFull,
    VersionWriter,
    apply_deltas,
    is_delta,
    whole_version,
)
from hybridflow.weight_sync.delta_block import KINDS, SAME, DamagedBlock, decode, encode
from hybridflow.weight_sync.delta_manifest import DATA, MANIFEST, WEIGHTS
from tests.servers import Rollout
from tests.tiny_models import make_model

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model") / "source")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


@pytest.fixture
def writer(source: Path, shared: Path, tmp_path: Path) -> Iterator[VersionWriter]:
    writer = VersionWriter(shared, source, tmp_path, full_every=4)
    yield writer
    writer.close()


def _weights(folder: Path) -> Weights:
    return load_file(folder / WEIGHTS)


def _stepped(weights: Weights, seed: int, share: float = 0.02) -> Weights:
    """As after a step of a small learning rate: a share of the numbers, moved to a near one."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in weights.items():
        mask = torch.rand(tensor.shape, generator=generator) < share
        moved[name] = torch.where(mask, (tensor * 1.01).to(tensor.dtype), tensor)
    return moved


def _equal(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[n].view(torch.uint8), second[n].view(torch.uint8)) for n in first
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


_KINDS = st.sampled_from(["none", "few", "many", "all", "wild"])


@settings(max_examples=150)
@given(
    st.sampled_from(["i1", "i2", "i4", "i8"]), st.integers(1, 3000), _KINDS, st.integers(0, 2**31)
)
def test_any_change_of_a_block_comes_back(dtype: str, size: int, kind: str, seed: int):
    random = np.random.default_rng(seed)
    bounds = np.iinfo(dtype)
    old = random.integers(bounds.min, bounds.max, size, dtype, endpoint=True)
    share = {"none": 0.0, "few": 0.003, "many": 0.2, "all": 1.0, "wild": 1.0}[kind]
    step = random.integers(-3, 4, size, dtype) if kind != "wild" else old[::-1]
    new = old + np.where(random.random(size) < share, step, 0).astype(dtype)
    name, payload = encode(old, new)
    assert name in KINDS and (name == SAME) == bool((old == new).all())
    decode(old, name, payload)
    assert (old == new).all()


@settings(max_examples=150)
@given(
    st.sampled_from(KINDS[1:]), st.binary(max_size=60), st.integers(0, 40), st.integers(0, 2**31)
)
def test_a_damaged_block_is_refused_or_decoded(kind: str, noise: bytes, cut: int, seed: int):
    """Never another exception: the digest of the tensor decides about what can be decoded."""
    old = np.arange(2000, dtype="i2")
    new = old + (np.random.default_rng(seed).random(2000) < 0.05).astype("i2")
    payload = encode(old, new)[1]
    for damaged in (noise, payload[:cut], payload[:cut] + noise + payload[cut + len(noise) :]):
        try:
            decode(old.copy(), kind, damaged)
        except DamagedBlock as error:
            assert str(error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_chain_of_deltas_is_bit_exact(
    writer: VersionWriter, shared: Path, local: Path, source: Path, dtype: torch.dtype
):
    weights = {name: tensor.to(dtype) for name, tensor in _weights(source).items()}
    weights["model.norm.weight"][:3] = torch.tensor([float("nan"), -0.0, float("-inf")])
    made = [weights]
    for version in range(1, 7):
        writer.write(iter(sorted(made[-1].items(), reverse=True)), version)
        made.append(_stepped(made[-1], version))
    kinds = [(shared / f"v{version}" / WEIGHTS).exists() for version in range(1, 7)]
    assert kinds == [True, False, False, False, True, False]
    for version in (1, 3, 4, 6):
        folder = whole_version(shared, version, local)
        assert _equal(_weights(folder), made[version - 1])
        assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype)[6:]
        assert (folder / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in local.iterdir()) == ["v3", "v4", "v6"]
    assert whole_version(shared, 1, local) == shared / "v1", "a full version is not copied"


def test_deltas_are_as_large_as_the_change(writer: VersionWriter, source: Path):
    weights = {name: tensor.bfloat16() for name, tensor in _weights(source).items()}
    full = (writer.write(weights.items(), 1) / WEIGHTS).stat().st_size
    nothing = writer.write(weights.items(), 2)
    assert (nothing / DATA).stat().st_size == 0
    stepped = _stepped(weights, seed=0)
    assert (writer.write(stepped.items(), 3) / DATA).stat().st_size < 0.05 * full
    everything = {name: torch.randn(t.shape).bfloat16() for name, t in weights.items()}
    assert (writer.write(everything.items(), 4) / DATA).stat().st_size < 1.01 * full


def test_a_tensor_of_several_blocks(tmp_path: Path):
    source = make_model(tmp_path / "large", "llama", vocab_size=50_000)
    weights = _weights(source)
    assert weights["lm_head.weight"].nbytes > 2 * (4 << 20)
    last = _stepped(weights, seed=1)
    last["model.embed_tokens.weight"][: 3 << 15] = weights["model.embed_tokens.weight"][: 3 << 15]
    writer = VersionWriter(tmp_path / "shared", source, tmp_path)
    writer.write(weights.items(), 1)
    writer.write(last.items(), 2)
    writer.close()
    assert _equal(_weights(whole_version(tmp_path / "shared", 2, tmp_path / "local")), last)


@pytest.fixture
def three(writer: VersionWriter, source: Path, shared: Path) -> list[Weights]:
    """Versions 1 (full), 2 and 3 (deltas) in `shared`."""
    made = [_weights(source)]
    made += [_stepped(made[0], 1)]
    made += [_stepped(made[1], 2)]
    for version, weights in enumerate(made, start=1):
        writer.write(weights.items(), version)
    return made


def test_a_local_version_is_started_from(three: list[Weights], shared: Path, local: Path):
    second = whole_version(shared, 2, local)
    shutil.rmtree(shared / "v1")
    third = whole_version(shared, 3, local)
    assert _equal(_weights(second), three[1]) and _equal(_weights(third), three[2])
    assert [path.name for path in remove_versions(local, keep=3)] == ["v2"]


def test_what_a_chain_needs_stays(three: list[Weights], writer: VersionWriter, shared: Path):
    assert remove_versions(shared, keep=3) == []
    for version in (4, 5):
        writer.write(three[2].items(), version)
    assert len(remove_versions(shared, keep=5)) == 4
    assert [path.name for path in shared.iterdir()] == ["v5"]


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
        other.write(_stepped(three[0], 7 * version).items(), version)
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


def test_a_server_serves_full_and_delta_versions(
    local_server: Rollout, shared: Path, local: Path, tmp_path: Path
):
    weights = _weights(local_server.model)
    config = json.loads((local_server.model / "config.json").read_text())
    writer = VersionWriter(shared, local_server.model, tmp_path)
    kinds = []
    for step in range(4):
        served = weights if step == 3 else _stepped(weights, step)  # its own again at the end
        version = local_server.next_version()
        kinds.append(is_delta(writer.write(served.items(), version)))
        folder = whole_version(shared, version, local)
        report = publish(local_server.client, folder, version, server_checksum(served, config))
        assert report.checksum == local_server.client.checksum()
        remove_versions(local, keep=version)
    writer.close()
    assert kinds == [False, True, True, True]
    [[sample]] = local_server.client.generate([[5, 17, 33]], 1, Sampling(4, temperature=0.0))
    assert sample.weight_version == str(version)
