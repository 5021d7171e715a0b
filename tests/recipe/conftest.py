"""A model folder, data files and a recipe that pass every check, made without torch."""

import json
import struct
from pathlib import Path

import pytest

from megatron_bridge.mappings import huggingface_shapes
from megatron_bridge.translation import resolve

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 4,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}

RECIPE = """\
name: tiny
model: {path: model}
cluster: {devices_per_node: 12}
data:
  train: train.jsonl
  eval: eval.jsonl
  max_prompt_tokens: 8
  prompts_per_step: 4
  samples_per_prompt: 3
steps: 5
roles:
  actor: {parallel: {dp: 2}, optimizer: {lr: 1e-3}}
  reference: {colocate: actor}
  rollout: {sampling: {max_tokens: 4}}
  reward: {function: exact_match}
dataflow: grpo
algorithm: {kl: {coef: 0.1}}
evaluation: {every: 2}
checkpoint: {every: 2}
"""


def write_weights(folder: Path, config: dict) -> Path:
    """A whole safetensors file of zeros for every tensor of the architecture."""
    header, end = {}, 0
    for name, shape in huggingface_shapes(resolve(config)).items():
        size = 4
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


def write_rows(path: Path, count: int) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test: recipe.yaml, model/, train.jsonl, eval.jsonl."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer.json").write_text("{}")
    write_weights(model, CONFIG)
    write_rows(tmp_path / "train.jsonl", 12)
    write_rows(tmp_path / "eval.jsonl", 3)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path
