"""Conversions there and back, and every mistake that a user can make."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_bridge.convert.memory import Budget
from tests.bridge_cli.checkpoints import contents, fail, succeed, write_qwen3


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("source") / "qwen3")


@pytest.fixture(scope="module")
def megatron(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("megatron") / "qwen3"
    succeed("convert", source, folder, "--parallel", "tp=2,pp=2", "--workers", 1)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same(one: Path, other: Path) -> None:
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("layout", [None, "tp=4,pp=3", "pp=2,first_stage_layers=1"])
def test_there_and_back_is_bit_for_bit(source, tmp_path, layout):
    there, back = tmp_path / "there", tmp_path / "back"
    parallel = ("--parallel", layout) if layout else ()
    succeed("convert", source, there, *parallel, "--workers", 2, "--memory", "64MiB")
    succeed("convert", there, back, "--shard-size", "1MB")
    assert_same(source, back)
    files = {path.name for path in back.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= files
    assert "modeling_evil.py" not in files
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(source).values())
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    shards = [p for p in back.glob("*.safetensors") if len(load_file(p)) > 1]
    assert all(path.stat().st_size < 1.1e6 for path in shards)


def test_tensors_without_a_weight_are_carried_along(source, tmp_path):
    spoiled, there, back = (tmp_path / name for name in ("spoiled", "there", "back"))
    shutil.copytree(source, spoiled)
    (spoiled / "model.safetensors.index.json").unlink()
    for file in spoiled.glob("*.safetensors"):
        file.unlink()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(16)}
    save_file({**tensors(source), **extra}, spoiled / "model.safetensors")
    succeed("convert", spoiled, there)
    succeed("convert", there, back)
    assert_same(spoiled, back)


def test_a_dtype_casts_all_but_what_stays_in_float32(megatron, source, tmp_path):
    succeed("convert", megatron, tmp_path / "bf16", "--dtype", "bfloat16")
    cast, was = tensors(tmp_path / "bf16"), tensors(source)
    assert all(torch.equal(cast[name], was[name].bfloat16()) for name in was)
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"


def test_a_megatron_checkpoint_is_cut_anew(megatron, source, tmp_path):
    again, back = tmp_path / "again", tmp_path / "back"
    succeed("convert", megatron, again, "--to", "megatron", "--parallel", "tp=4")
    assert json.loads(succeed("inspect", again, "--json"))["layout"] == "tp=4,pp=1,dp=1"
    succeed("convert", again, back)
    assert_same(source, back)


def test_a_megatron_checkpoint_without_a_config_needs_one(megatron, source, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(megatron / "release", bare)
    assert "as --config" in fail("convert", bare, tmp_path / "out")
    succeed("convert", bare, tmp_path / "out", "--config", source)
    assert_same(source, tmp_path / "out")


def test_a_config_of_another_model_is_refused(megatron, tmp_path):
    """Also where it asks for less than the checkpoint holds: what it leaves out would be lost."""
    tied = write_qwen3(tmp_path / "tied", tie_word_embeddings=True)
    alone = tmp_path / "alone"
    shutil.copytree(megatron / "release", alone)
    error = fail("convert", alone, tmp_path / "back", "--config", tied)
    assert "'output_layer.weight' is in the checkpoint" in error
    error = fail("convert", alone, tmp_path / "back", "--config", tmp_path / "nowhere")
    assert "nowhere is no folder with a config.json" in error


def test_the_bound_counts_what_a_layout_cuts():
    def least(rectangles: int) -> int:
        return Budget(2**40, 1, tensors=10, rectangles=rectangles, bytes=2**30).least

    assert least(100_000) - least(10) > 100 * 2**20


def test_the_bound_is_kept_near_its_least(source, tmp_path):
    arguments = ("convert", source, tmp_path / "a", "--workers", 1, "--json", "--memory")
    least = int(fail(*arguments, "1MiB").split()[-2])
    assert "is too small" in fail(*arguments, f"{least - 1}MiB")
    text = succeed(*arguments, f"{least}MiB")
    result = json.loads(text)
    assert 0 < result["peak"] <= result["memory"] == least * 2**20


def test_an_existing_destination_is_replaced_only_when_told(source, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "precious").write_text("mine")
    (there / "config.json").write_text("{}")  # nothing but a checkpoint is ever replaced
    assert "--overwrite" in fail("convert", source, there)
    assert (there / "precious").read_text() == "mine"
    succeed("convert", source, there, "--overwrite")
    assert not (there / "precious").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", 0), "--workers is at least 1"),
        (("--memory", "lots"), "'lots' is not a size"),
        (("--memory", "9" * 400 + "GiB"), "is not a size"),
        (("--memory", "8MiB"), "the least that works is"),
        (("--parallel", "tp=3"), "tp=3 does not divide"),
        (("--parallel", "tpp=2"), "did you mean 'tp'"),
        (("--to", "huggingface", "--parallel", "tp=2"), "--parallel is for Megatron"),
        (("--shard-size", "1GB"), "--shard-size is for HuggingFace"),
        (("--config", "."), "--config is for Megatron"),
        (("--adapter", "."), "is no adapter"),
        (("--dtype", "int8"), "invalid choice"),
    ],
)
def test_a_wrong_option_is_one_message(source, tmp_path, arguments, said):
    assert said in fail("convert", source, tmp_path / "out", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_place_is_one_message(source, tmp_path):
    assert "does not exist" in fail("convert", tmp_path / "absent", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert "is no checkpoint" in fail("convert", tmp_path / "empty", tmp_path / "out")
    assert "must not contain each other" in fail("convert", source, source / "inside")
    assert "must not contain each other" in fail("convert", source, source)
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in fail("convert", source, file, "--overwrite")
    # Nobody, not even root, makes a folder below a file or in /proc.
    for where in (file / "out", Path("/proc/out/there")):
        done = fail("convert", source, where, status=1)
        assert len(done.strip().splitlines()) == 1


def test_what_is_wrong_with_a_source_is_one_message(source, tmp_path):
    spoiled = shutil.copytree(source, tmp_path / "spoiled")
    first = spoiled / "model-00001-of-00003.safetensors"
    content = first.read_bytes()
    first.write_bytes(content[:-10])
    assert "truncated" in fail("convert", spoiled, tmp_path / "out")
    first.unlink()
    assert "missing" in fail("convert", spoiled, tmp_path / "out")
    first.write_bytes(content)
    config = json.loads((spoiled / "config.json").read_text())
    (spoiled / "config.json").write_text(json.dumps({**config, "hidden_size": 256}))
    assert "does not fit its config.json" in fail("convert", spoiled, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["spoiled"]


def test_the_source_is_left_as_it_was(source, megatron):
    before = contents(source)
    succeed("inspect", source)
    succeed("diff", source, megatron)
    assert contents(source) == before


@pytest.mark.parametrize("to", ["megatron", "huggingface"])
def test_a_cast_that_cannot_hold_a_number_is_an_error(tmp_path, to):
    source = write_qwen3(tmp_path / "source", files=1)
    file = source / "model-00001-of-00001.safetensors"
    held = load_file(file)
    held["model.norm.weight"][:3] = torch.tensor([7e4, float("nan"), float("inf")])
    save_file(held, file)
    arguments = ("convert", source, tmp_path / "there", "--to", to, "--dtype")
    error = fail(*arguments, "float16")
    assert "'model.norm.weight' has numbers up to 70000" in error
    shutil.rmtree(tmp_path / ".there.partial")
    succeed(*arguments, "bfloat16")
    held["model.norm.weight"][0] = 0.0
    save_file(held, file)
    succeed(*arguments, "float16", "--overwrite")  # what was infinite before may stay


def test_a_name_that_safetensors_cannot_hold(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"architectures": ["Unknown"], "model_type": "unknown"}')
    torch.save({"__metadata__": torch.ones(2)}, source / "pytorch_model.bin")
    error = fail("convert", source, tmp_path / "there", "--to", "huggingface")
    assert "cannot hold a tensor named '__metadata__'" in error
