"""`inspect`, `diff` and `verify`: what they tell and how they end."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bridge_cli.checkpoints import command, fail, succeed, write_qwen3

_FILE = "model-00001-of-00001.safetensors"
_NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("source") / "qwen3", files=1, num_hidden_layers=2)


def _changed(source: Path, folder: Path, change) -> Path:
    """A copy whose tensors `change` altered."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / _FILE)
    change(tensors)
    save_file(tensors, folder / _FILE)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, _FILE)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _diff(status: int, *arguments) -> dict:
    done = command("diff", *arguments, "--json")
    assert done.status == status, done
    return json.loads(done.output)


def test_a_folder_is_inspected(source):
    found = json.loads(succeed("inspect", source, "--json"))
    stored = load_file(source / _FILE)
    assert found["kind"] == "huggingface"
    assert found["architecture"] == "Qwen3ForCausalLM"
    assert found["supported"] is True and found["tied"] is False
    assert found["tensors"] == len(stored)
    assert found["parameters"] == sum(tensor.numel() for tensor in stored.values())
    assert found["dtypes"]["float32"]["bytes"] == sum(t.nbytes for t in stored.values())
    assert "labels" not in found["details"], "a language model has none"
    text = succeed("inspect", source)
    assert "Qwen3ForCausalLM" in text and f"{found['parameters']:,}" in text


def test_a_file_and_an_unknown_architecture_are_inspected(source, tmp_path):
    assert json.loads(succeed("inspect", source / _FILE, "--json"))["kind"] == "file"
    other = shutil.copytree(source, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen9"]}))
    found = json.loads(succeed("inspect", other, "--json"))
    assert found["supported"] is False and "no table for Qwen9" in found["reason"]
    # From HuggingFace to HuggingFace no table is needed.
    succeed("convert", other, tmp_path / "copy", "--to", "huggingface")
    assert "no table for Qwen9" in fail("convert", other, tmp_path / "megatron")


def test_equal_and_different_values(source, tmp_path):
    def change(tensors):
        tensors[_NORM][3] += 0.5
        tensors["lm_head.weight"][0, 0] = torch.nan

    other = _changed(source, tmp_path / "other", change)
    assert _diff(0, source, source)["equal"]
    assert _diff(0, other, other)["equal"], "a NaN equals a NaN in the same place"
    found = {d["name"]: d for d in _diff(1, source, other)["differences"]}
    assert found.keys() == {_NORM, "lm_head.weight"}
    largest = max(load_file(folder / _FILE)[_NORM].abs().max().item() for folder in (source, other))
    assert found[_NORM]["elements"] == 1
    assert found[_NORM]["max_absolute"] == pytest.approx(0.5, rel=1e-6)
    assert found[_NORM]["max_relative"] == pytest.approx(0.5 / largest, rel=1e-6)
    assert found["lm_head.weight"]["max_absolute"] == "inf"
    loose = _diff(1, source, other, "--tolerance", 0.9)["differences"]
    assert [difference["name"] for difference in loose] == ["lm_head.weight"]


def test_missing_shapes_and_dtypes(source, tmp_path):
    def change(tensors):
        del tensors["lm_head.weight"]
        tensors["extra"] = torch.zeros(1)
        tensors[_NORM] = tensors[_NORM].bfloat16()
        tensors["model.embed_tokens.weight"] = torch.zeros(3, 4)

    found = _diff(1, source, _changed(source, tmp_path / "other", change))
    assert found["only_in_a"] == ["lm_head.weight"]
    assert found["only_in_b"] == ["extra"]
    by_name = {d["name"]: d for d in found["differences"]}
    assert by_name[_NORM]["dtypes"] == ["float32", "bfloat16"]
    assert by_name["model.embed_tokens.weight"]["shapes"][1] == [3, 4]


def test_wrong_arguments(source, tmp_path):
    assert "does not exist" in fail("diff", source, tmp_path / "absent")
    assert "does not exist" in fail("inspect", tmp_path / "absent")
    assert "--tolerance is at least 0" in fail("diff", source, source, "--tolerance", "-1")
    assert "usage" in fail("diff", source)


def test_verify(source, tmp_path):
    report = json.loads(succeed("verify", source, "--parallel", "tp=2,pp=2", "--json"))
    assert report["ok"] and report["ranks"] == 4
    assert "proven" in succeed("verify", source / "config.json", "--parallel", "tp=4")
    assert "tp=3 does not divide" in fail("verify", source, "--parallel", "tp=3")
    assert "does not exist" in fail("verify", tmp_path, "--parallel", "tp=1")
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in fail("verify", tmp_path, "--parallel", "tp=1")


def test_diff_tells_equal_numbers_from_equal_bits(source, tmp_path):
    zero = _changed(source, tmp_path / "zero", lambda t: t[_NORM].zero_())
    negative = _changed(source, tmp_path / "negative", lambda t: t[_NORM].zero_().neg_())
    assert _diff(0, zero, zero)["bitwise"]
    assert not _diff(0, zero, negative)["bitwise"]
    assert "equal bit for bit" in succeed("diff", zero, zero)
    assert "zeros differ in sign" in succeed("diff", zero, negative)


def test_diff_tells_neighbours_among_whole_numbers_apart(tmp_path):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file, last in zip(files, (2**53, 2**53 + 1), strict=True):
        save_file({"n": torch.tensor([2**53, last])}, file)
    assert _diff(1, *files)["differences"][0]["elements"] == 1


def test_a_config_with_absurd_numbers_ends_at_once(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "num_hidden_layers": 10**30}))
    assert "num_hidden_layers" in fail("verify", file, "--parallel", "tp=1")
    file.write_text(json.dumps(config))
    assert "at most" in fail("verify", file, "--parallel", "dp=1000000")


def test_a_pickled_adapter_is_inspected_and_compared(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    torch.save(
        {"base_model.model.q.lora_A.weight": torch.ones(2, 3)}, tmp_path / "adapter_model.bin"
    )
    found = json.loads(succeed("inspect", tmp_path, "--json"))
    assert found["kind"] == "adapter" and found["parameters"] == 6
    assert _diff(0, tmp_path, tmp_path)["compared"] == 1
