"""Loading what is damaged, foreign or hostile; saving what transformers loads."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from megatron_bridge import live
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.runtime import parallel
from tests.bridge import tiny
from tests.ranks import run_ranks

_ONE = ParallelLayout()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return tiny.save(tiny.model("qwen3"), tmp_path_factory.mktemp("source"))


@pytest.fixture
def folder(source, tmp_path) -> Path:
    """A copy to spoil."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    return tmp_path


def _load_error(folder: Path) -> str:
    parallel.initialize(_ONE)
    config = live.load_hf_config(folder)
    model = live.build_model(config, _ONE, dtype=torch.float32)
    with pytest.raises(ValueError) as error:
        live.load_weights(model, folder)
    return str(error.value)


def _error(folder: Path) -> str:
    return run_ranks(_load_error, 1, folder)[0]


def _spoil(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_unknown_and_misshaped_tensors_are_told_at_once(folder):
    def change(tensors):
        del tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.9.self_attn.q_norm.weight"] = torch.zeros(16)
        tensors["model.norm.weight"] = torch.zeros(40)

    _spoil(folder, change)
    text = _error(folder)
    assert "'model.layers.2.mlp.up_proj.weight' is missing" in text
    assert "no mapping covers the HuggingFace tensor 'model.layers.1.self_attn.q_proj.bias'" in text
    assert "'model.layers.9.self_attn.q_norm.weight' is of a layer" in text
    assert "'model.norm.weight' has shape (40,), config.json asks for (48,)" in text


def test_a_truncated_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert str(path) in _error(folder)


def test_a_folder_without_config_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        live.load_hf_config(tmp_path)


def _load_other(folder: Path, **fields) -> str:
    parallel.initialize(_ONE)
    config = {**live.load_hf_config(folder), **fields}
    model = live.build_model(config, _ONE, dtype=torch.float32)
    with pytest.raises(ValueError) as error:
        live.load_weights(model, folder)
    return str(error.value)


def test_weights_of_a_model_that_computes_something_else_are_refused(source):
    (text,) = run_ranks(_load_other, 1, source, rms_norm_eps=1e-3)
    assert "it says {'layernorm_epsilon': 1e-06}" in text


def _refused_layouts() -> list[str]:
    parallel.initialize(ParallelLayout(tp=2))
    config = tiny.config("qwen3", num_key_value_heads=3, num_attention_heads=9).to_dict()
    texts = []
    for layout in (ParallelLayout(tp=2), ParallelLayout(dp=2)):
        with pytest.raises(ValueError) as error:
            live.build_model(config, layout, dtype=torch.float32)
        texts.append(str(error.value))
    return texts


def test_tensor_parallelism_that_cuts_heads_unevenly_is_refused():
    cut, other = run_ranks(_refused_layouts, 2)[0]
    assert "tp=2 does not divide num_key_value_heads=3" in cut
    assert "is not the tp=2,pp=1,dp=1" in other


def _wrong_world() -> None:
    parallel.initialize(ParallelLayout(tp=2))


def test_a_layout_must_fill_the_process_group():
    with pytest.raises(AssertionError, match="needs 2 ranks, the process group has 1"):
        run_ranks(_wrong_world, 1)


def _save(source: Path, target: Path, layout: ParallelLayout, dtype: torch.dtype) -> None:
    parallel.initialize(layout)
    model = live.build_model(live.load_hf_config(source), layout, dtype=dtype)
    live.load_weights(model, source)
    live.save_pretrained(model, source, target, shard_bytes=40_000)
    assert target.is_dir()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_folder_is_one_that_transformers_loads(source, tmp_path, dtype):
    (source / "tokenizer_config.json").write_text("{}")
    (source / "modeling_own.py").write_text("raise SystemExit")
    target = tmp_path / "export"
    target.mkdir()
    (target / "stale.safetensors").write_bytes(b"")
    run_ranks(_save, 4, source, target, ParallelLayout(tp=2, pp=2), dtype)
    saved = transformers.AutoModelForCausalLM.from_pretrained(target)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    assert saved.dtype == dtype
    for (name, one), other in zip(saved.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert len(list(target.glob("model-*-of-*.safetensors"))) > 1
    names = {path.name for path in target.iterdir()}
    assert "tokenizer_config.json" in names
    assert not names & {"modeling_own.py", "stale.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def _reload(source: Path, layout: ParallelLayout) -> bool:
    """A sharded folder, loaded and exported again at another layout."""
    parallel.initialize(layout)
    config = live.load_hf_config(source)
    model = live.build_model(config, layout, dtype=torch.float32)
    live.load_weights(model, source)
    exported = dict(live.export_weights(model, config))
    wanted = {n: t for f in source.glob("*.safetensors") for n, t in load_file(f).items()}
    if dist.get_rank() != 0:
        return not exported
    return exported.keys() == wanted.keys() and all(
        torch.equal(exported[name], wanted[name]) for name in wanted
    )


def test_sharded_folders_load_at_other_layouts(tmp_path):
    folder = tiny.save(tiny.model("llama", vocab_size=6), tmp_path, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert all(run_ranks(_reload, 4, folder, ParallelLayout(pp=4)))


def test_a_rank_may_hold_nothing_but_padding_of_the_vocabulary(tmp_path):
    sizes: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 5}
    folder = tiny.save(tiny.model("llama", **sizes), tmp_path)
    assert all(run_ranks(_reload, 4, folder, ParallelLayout(tp=4)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_whole_numbers_are_no_weights(folder, dtype):
    name = "model.layers.1.self_attn.q_proj.weight"
    _spoil(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert f"'{name}' holds whole numbers ({dtype})" in _error(folder)


def _tie(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))


def test_an_output_layer_of_its_own_is_not_tied_away(folder):
    _tie(folder)
    text = _error(folder)
    assert "'lm_head.weight' differs from 'model.embed_tokens.weight'" in text
    assert "tie_word_embeddings" in text


def _load_tied(folder: Path) -> set[str]:
    parallel.initialize(_ONE)
    config = live.load_hf_config(folder)
    model = live.build_model(config, _ONE, dtype=torch.float32)
    live.load_weights(model, folder)
    return {name for name, _ in live.export_weights(model, config)}


def test_a_copy_of_the_tied_embedding_is_passed_over(folder):
    _tie(folder)
    embedding = "model.embed_tokens.weight"
    _spoil(folder, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    (names,) = run_ranks(_load_tied, 1, folder)
    assert embedding in names and "lm_head.weight" not in names


def _build(folder: Path, dtype) -> None:
    parallel.initialize(_ONE)
    live.build_model(live.load_hf_config(folder), _ONE, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, "bfloat16"])
def test_a_model_is_of_float32_or_bfloat16(source, dtype):
    with pytest.raises(AssertionError, match=f"dtype={dtype} is not one of torch.float32"):
        run_ranks(_build, 1, source, dtype)


_LAYOUT = ParallelLayout(tp=2, pp=2)


def _refused(source: Path, target: Path) -> str:
    """The error that this rank gets, and then a collective that all ranks still take part in."""
    parallel.initialize(_LAYOUT)
    model = live.build_model(live.load_hf_config(source), _LAYOUT, dtype=torch.float32)
    live.load_weights(model, source)
    with pytest.raises((ValueError, OSError, RuntimeError)) as error:
        live.save_pretrained(model, source, target)
    dist.barrier()
    return f"{type(error.value).__name__}: {error.value}"


def _own_things(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "thesis.tex").write_text("years of work")
    return folder


def _notes(folder: Path) -> Path:
    folder.mkdir()
    (folder / "notes.txt").write_text("kept")
    return folder


def _file(path: Path) -> Path:
    path.write_text("kept")
    return path


def _under_a_file(path: Path) -> Path:
    return _file(path) / "export"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_own_things, "ValueError: .* holds the folder 'sub'"),
        (_notes, "ValueError: .* holds files, and no model"),
        (_file, "ValueError: .* is a file or a link"),
        (_under_a_file, "(FileExists|NotADirectory)Error"),
    ],
)
def test_where_rank_0_cannot_write_every_rank_learns_and_nothing_is_lost(
    source, tmp_path, make, message
):
    target = make(tmp_path / "target")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    first, *others = run_ranks(_refused, 4, source, target)
    assert re.match(message, first), first
    assert all(text.startswith("RuntimeError: rank 0 could not write") for text in others)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def _die(source: Path, victim: int) -> None:
    parallel.initialize(_LAYOUT)
    config = live.load_hf_config(source)
    model = live.build_model(config, _LAYOUT, dtype=torch.float32)
    if dist.get_rank() == victim:
        os._exit(1)
    for _ in live.export_weights(model, config):
        pass
    raise AssertionError("an export without one of its ranks")


@pytest.mark.parametrize("victim", [0, 2])
def test_an_export_without_one_of_its_ranks_ends_and_says_what_it_waited_for(source, victim):
    with pytest.raises(AssertionError) as error:
        run_ranks(_die, 4, source, victim)
    way = "to rank 0" if victim == 0 else "from rank 2"
    assert re.search(
        f"exporting '.*' {way} failed: that rank's process has ended", str(error.value)
    )
    assert "had not finished" not in str(error.value)
