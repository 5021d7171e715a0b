"""Every family there and back at a layout, bit for bit; a PEFT adapter merged on the way."""

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.bridge import families_dense, families_moe, tiny
from tests.bridge_cli.checkpoints import succeed

_DENSE = ("tp=2,pp=2", "pp=2,first_stage_layers=1")
_EXPERTS = ("tp=2,ep=2,etp=1,pp=2", "tp=2,etp=2,ep=1", "dp=2,ep=2,pp=2")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def _assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("kind", [*families_dense.CONFIGS, *families_moe.CONFIGS])
def test_there_and_back(kind, tmp_path):
    layouts = _EXPERTS if kind in families_moe.CONFIGS else _DENSE
    make = families_moe.model if kind in families_moe.CONFIGS else families_dense.model
    source = tiny.save(make(kind), tmp_path / "source")
    layout = layouts[len(kind) % len(layouts)]
    there, back = tmp_path / "there", tmp_path / "back"
    succeed("convert", source, there, "--parallel", layout, "--workers", 1)
    succeed("convert", there, back, "--workers", 1)
    _assert_same(_tensors(source), _tensors(back))
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


def test_an_adapter_is_merged_as_peft_merges_it(tmp_path):
    base = tiny.save(tiny.model("qwen3"), tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    made = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    made.save_pretrained(tmp_path / "adapter")
    merged = tiny.save(made.merge_and_unload(), tmp_path / "merged")
    there, back = tmp_path / "there", tmp_path / "back"
    succeed("convert", base, there, "--adapter", tmp_path / "adapter", "--parallel", "tp=2")
    succeed("convert", there, back)
    _assert_same(_tensors(merged), _tensors(back))
    assert json.loads(succeed("inspect", tmp_path / "adapter", "--json"))["kind"] == "adapter"
