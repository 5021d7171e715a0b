"""A real checkpoint through Megatron and back: the same bits, the same words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.assets import make_smollm2

PROMPTS = ("The capital of France is", "def fibonacci(n):")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    make_smollm2(folder)
    return folder


def _run(*arguments: object) -> dict:
    command = [sys.executable, "-m", "megatron_bridge", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _generate(folder: Path) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=24, do_sample=False)
        texts.append(tokenizer.decode(out[0]))
    return texts


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("parallel", ["tp=3", "pp=5", "tp=3,pp=5"])
def test_smollm2_comes_back_bit_for_bit(smollm2: Path, tmp_path: Path, parallel: str) -> None:
    _run("convert", smollm2, tmp_path / "megatron", "--parallel", parallel, "--memory", "1GiB")
    _run("convert", tmp_path / "megatron", tmp_path / "back")
    source = load_file(smollm2 / "model.safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == source.keys()
    assert all(
        back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)
        for name, tensor in source.items()
    )
    assert _generate(tmp_path / "back") == _generate(smollm2)
