"""The server's layout and its digest, against constructions written out by hand."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.weight_sync import ServerDigest, server_checksum
from hybridflow.weight_sync.checksum import parameters_checksum, tensor_digest
from hybridflow.weight_sync.layout import check, elements, hf_shapes, server_parameters
from hybridflow.weight_sync.layout.build import build, parameter_bytes
from tests.tiny_models import make_model

FAMILIES = [
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen3", {}),
]


def _read(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


def _built(config, weights, tp: int, dtype=torch.float32):
    return [
        {p.name: build(p, weights, dtype) for p in server_parameters(config, tp=tp, rank=rank)}
        for rank in range(tp)
    ]


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_names_and_shapes_are_transformers(tmp_path: Path, family: str, changes: dict):
    config, weights = _read(make_model(tmp_path / "m", family, **changes))
    assert hf_shapes(config) == {name: tuple(t.shape) for name, t in weights.items()}


def test_two_ranks_by_hand(tmp_path: Path):
    config, weights = _read(make_model(tmp_path / "m"))
    ranks = _built(config, weights, tp=2)
    block = "model.layers.1."
    q, k, v = (weights[f"{block}self_attn.{n}_proj.weight"] for n in "qkv")
    gate, up = (weights[f"{block}mlp.{n}_proj.weight"] for n in ("gate", "up"))
    padded = torch.zeros(128, 48)  # 80 up to a multiple of 32 x 2
    for rank, parameters in enumerate(ranks):
        want = torch.cat([x.chunk(2)[rank] for x in (q, k, v)])
        assert torch.equal(parameters[block + "self_attn.qkv_proj.weight"], want)
        padded[:80] = gate
        left = padded[rank * 64 : rank * 64 + 64].clone()
        padded[:80] = up
        right = padded[rank * 64 : rank * 64 + 64]
        assert torch.equal(parameters[block + "mlp.gate_up_proj.weight"], torch.cat([left, right]))
    embedding = torch.cat([parameters["model.embed_tokens.weight"] for parameters in ranks])
    assert embedding.shape == (128, 48)
    assert torch.equal(embedding[:101], weights["model.embed_tokens.weight"])
    assert not embedding[101:].any()
    down = torch.cat([parameters[block + "mlp.down_proj.weight"] for parameters in ranks], 1)
    assert torch.equal(down[:, :80], weights[block + "mlp.down_proj.weight"])
    assert not down[:, 80:].any()


def test_the_digest_is_sglangs_formula(tmp_path: Path):
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    raw = b"".join(value.numpy().tobytes() for value in tensor.view(-1))
    assert tensor_digest(tensor.t()) != tensor_digest(tensor)
    assert tensor_digest(tensor) == hashlib.sha256(raw).hexdigest()[:16]
    rank = hashlib.sha256(b"a" + tensor_digest(tensor).encode()).hexdigest()
    assert (
        parameters_checksum([{"a": tensor}] * 2) == hashlib.sha256((rank * 2).encode()).hexdigest()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_the_streamed_digest_is_of_the_built_parameters(tmp_path, family, changes, tp, dtype):
    config, weights = _read(make_model(tmp_path / "m", family, **changes))
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    want = parameters_checksum(_built(config, weights, tp, dtype))
    assert server_checksum(weights, config, tp) == want
    backwards = ServerDigest(config, tp)
    passed = dict(backwards.watch(reversed(weights.items())))
    assert passed.keys() == weights.keys()
    assert backwards.result() == want
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    assert server_checksum(weights, config, tp) != want


def test_a_tied_head_is_not_counted(tmp_path: Path):
    config, weights = _read(make_model(tmp_path / "m", "llama", tie_word_embeddings=True))
    head = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    assert server_checksum(head, config) == server_checksum(weights, config)


def test_faults_are_named(tmp_path: Path):
    config, weights = _read(make_model(tmp_path / "m"))
    digest = ServerDigest(config)
    digest.add("model.norm.weight", weights["model.norm.weight"])
    with pytest.raises(ValueError, match="given twice"):
        digest.add("model.norm.weight", weights["model.norm.weight"])
    with pytest.raises(ValueError, match="did you mean 'lm_head.weight'"):
        digest.add("lm_hed.weight", weights["lm_head.weight"])
    with pytest.raises(ValueError, match="weights are missing"):
        digest.result()
    with pytest.raises(ValueError, match="tp must divide the model's 2 KV heads"):
        server_parameters(config, tp=4)
    with pytest.raises(ValueError, match="Qwen2ForCausalLM"):
        check({**config, "architectures": ["Qwen2NextForCausalLM"]})


def test_bytes_count_padding(tmp_path: Path):
    config, weights = _read(make_model(tmp_path / "m"))
    [built] = _built(config, weights, 1)
    parameters = server_parameters(config)
    assert elements(parameters) == sum(tensor.numel() for tensor in built.values())
    assert parameter_bytes(parameters, torch.float32) == 4 * elements(parameters)
