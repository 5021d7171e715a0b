"""A written version is a whole HuggingFace folder, or nothing."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.weight_sync import remove_versions, write_version
from tests.tiny_models import make_model, reference


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = make_model(tmp_path / "source")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_it(source: Path, tmp_path: Path, dtype: torch.dtype):
    weights = {name: (tensor * 2).to(dtype) for name, tensor in _weights(source).items()}
    shuffled = sorted(weights.items(), key=lambda pair: pair[0][::-1])
    folder = write_version(tmp_path / "out", iter(shuffled), source, 3)
    assert folder == tmp_path / "out" / "v3"
    written = _weights(folder)
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    loaded = dict(reference(folder).named_parameters())
    assert all(torch.equal(loaded[name], weights[name].float()) for name in weights)
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype)[6:]
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["v3"]


def test_a_tied_head_is_left_out(tmp_path: Path):
    source = make_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    weights = _weights(source)
    pairs = [*weights.items(), ("lm_head.weight", weights["model.embed_tokens.weight"])]
    assert _weights(write_version(tmp_path / "out", pairs, source, 1)).keys() == weights.keys()


def _change(weights: dict, name: str, tensor: torch.Tensor | None) -> list:
    changed = {**weights, name: tensor}
    return [(key, value) for key, value in changed.items() if value is not None]


def test_faulty_streams_leave_nothing(source: Path, tmp_path: Path):
    weights = _weights(source)
    norm = weights["model.norm.weight"]
    cases = [
        (_change(weights, "model.norm.weight", None), "1 weights are missing"),
        (_change(weights, "model.norm.weight", norm[:3]), r"has shape \(3,\)"),
        (_change(weights, "model.norm.weight", norm.bfloat16()), "holds one dtype"),
        (_change(weights, "model.nrm.weight", norm), "is unknown"),
        ([*weights.items(), ("model.norm.weight", norm)], "came twice"),
        ([], "weights are missing"),
    ]
    for pairs, text in cases:
        with pytest.raises(ValueError, match=text):
            write_version(tmp_path / "out", pairs, source, 1)
        assert list((tmp_path / "out").iterdir()) == []


def test_too_little_space_is_said_first(source: Path, tmp_path: Path):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "vocab_size": 10**13}))
    pairs = [("model.norm.weight", _weights(source)["model.norm.weight"])]
    with pytest.raises(ValueError, match="MB free; the version needs"):
        write_version(tmp_path / "out", pairs, source, 1)
    assert list((tmp_path / "out").iterdir()) == []


def test_old_versions_go_and_none_is_overwritten(source: Path, tmp_path: Path):
    weights = _weights(source)
    for version in (1, 2, 10):
        write_version(tmp_path / "out", weights.items(), source, version)
    with pytest.raises(ValueError, match="exists already"):
        write_version(tmp_path / "out", weights.items(), source, 10)
    removed = remove_versions(tmp_path / "out", keep=10)
    assert sorted(path.name for path in removed) == ["v1", "v2"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["v10"]
    assert len(remove_versions(tmp_path / "out")) == 1
    assert (source / "tokenizer.json").is_file(), "links go, not what they name"


def test_a_folder_without_config_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="HuggingFace model folder"):
        write_version(tmp_path / "out", [], tmp_path, 1)
