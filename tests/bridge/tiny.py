"""Tiny HuggingFace models with all dimensions distinct."""

from pathlib import Path
from typing import Any

import torch
import transformers

ARCHITECTURES = ("llama", "qwen2", "qwen3")
VOCABULARY = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def config(kind: str, *, tied: bool = False, **fields: Any) -> Any:
    """A tiny config of one architecture."""
    make = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[kind]
    return make(**{**SIZES, "tie_word_embeddings": tied, **fields})


def model(kind: str, *, tied: bool = False, **fields: Any) -> Any:
    """A model of it with weights that no two tensors share, norms and biases included."""
    torch.manual_seed(7)
    made = transformers.AutoModelForCausalLM.from_config(config(kind, tied=tied, **fields))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return made


def save(made: Any, folder: Path, **options: Any) -> Path:
    """Write the model in HuggingFace format."""
    transformers.utils.logging.disable_progress_bar()
    made.save_pretrained(folder, **options)
    return folder
