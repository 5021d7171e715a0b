"""Deltas are bit-exact and as small as the change."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.rollout import Sampling
from hybridflow.weight_sync import remove_versions, server_checksum
from hybridflow.weight_sync.delta import VersionWriter, is_delta, whole_version
from hybridflow.weight_sync.delta_block import KINDS, SAME, DamagedBlock, decode, encode
from hybridflow.weight_sync.delta_manifest import DATA, WEIGHTS
from tests.servers import Rollout, load_and_prove
from tests.tiny_models import make_model
from tests.weight_sync.delta_cases import Weights, read_weights, same_bits, stepped

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
    weights = {name: tensor.to(dtype) for name, tensor in read_weights(source).items()}
    weights["model.norm.weight"][:3] = torch.tensor([float("nan"), -0.0, float("-inf")])
    made = [weights]
    for version in range(1, 7):
        writer.write(iter(sorted(made[-1].items(), reverse=True)), version)
        made.append(stepped(made[-1], version))
    kinds = [(shared / f"v{version}" / WEIGHTS).exists() for version in range(1, 7)]
    assert kinds == [True, False, False, False, True, False]
    for version in (1, 3, 4, 6):
        folder = whole_version(shared, version, local)
        assert same_bits(read_weights(folder), made[version - 1])
        assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype)[6:]
        assert (folder / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in local.iterdir()) == ["v3", "v4", "v6"]
    assert whole_version(shared, 1, local) == shared / "v1", "a full version is not copied"


def test_deltas_are_as_large_as_the_change(writer: VersionWriter, source: Path):
    weights = {name: tensor.bfloat16() for name, tensor in read_weights(source).items()}
    full = (writer.write(weights.items(), 1) / WEIGHTS).stat().st_size
    nothing = writer.write(weights.items(), 2)
    assert (nothing / DATA).stat().st_size == 0
    moved = stepped(weights, seed=0)
    assert (writer.write(moved.items(), 3) / DATA).stat().st_size < 0.05 * full
    everything = {name: torch.randn(t.shape).bfloat16() for name, t in weights.items()}
    assert (writer.write(everything.items(), 4) / DATA).stat().st_size < 1.01 * full


def test_a_tensor_of_several_blocks(tmp_path: Path):
    source = make_model(tmp_path / "large", "llama", vocab_size=50_000)
    weights = read_weights(source)
    assert weights["lm_head.weight"].nbytes > 2 * (4 << 20)
    last = stepped(weights, seed=1)
    last["lm_head.weight"] += 1e-4 * torch.randn_like(last["lm_head.weight"])
    last["model.embed_tokens.weight"][: 3 << 15] = weights["model.embed_tokens.weight"][: 3 << 15]
    writer = VersionWriter(tmp_path / "shared", source, tmp_path)
    writer.write(weights.items(), 1)
    writer.write(last.items(), 2)
    writer.close()
    assert same_bits(read_weights(whole_version(tmp_path / "shared", 2, tmp_path / "local")), last)


def test_a_local_version_is_started_from(three: list[Weights], shared: Path, local: Path):
    second = whole_version(shared, 2, local)
    shutil.rmtree(shared / "v1")
    third = whole_version(shared, 3, local)
    assert same_bits(read_weights(second), three[1]) and same_bits(read_weights(third), three[2])
    assert [path.name for path in remove_versions(local, keep=3)] == ["v2"]


def test_what_a_chain_needs_stays(three: list[Weights], writer: VersionWriter, shared: Path):
    assert remove_versions(shared, keep=3) == []
    for version in (4, 5):
        writer.write(three[2].items(), version)
    assert len(remove_versions(shared, keep=5)) == 4
    assert [path.name for path in shared.iterdir()] == ["v5"]


def test_a_server_serves_full_and_delta_versions(
    local_server: Rollout, shared: Path, local: Path, tmp_path: Path
):
    weights = read_weights(local_server.model)
    config = json.loads((local_server.model / "config.json").read_text())
    writer = VersionWriter(shared, local_server.model, tmp_path)
    kinds = []
    for step in range(4):
        served = weights if step == 3 else stepped(weights, step)  # its own again at the end
        version = local_server.next_version()
        kinds.append(is_delta(writer.write(served.items(), version)))
        folder = whole_version(shared, version, local)
        load_and_prove(local_server.client, folder, version, server_checksum(served, config))
        remove_versions(local, keep=version)
    writer.close()
    assert kinds == [False, True, True, True]
    [[sample]] = local_server.client.generate([[5, 17, 33]], 1, Sampling(4, temperature=0.0))
    assert sample.weight_version == str(version)
