"""A tiny Qwen3 whose dimensions are all distinct, in HuggingFace format."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Untied; 37 ids, so the vocabulary is padded at TP 2."""
    return _make(tmp_path_factory.mktemp("qwen3"), vocab_size=37, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tied_qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tied embeddings, which first and last pipeline stage share."""
    return _make(tmp_path_factory.mktemp("tied"), vocab_size=42, tie_word_embeddings=True)


def _make(folder: Path, **options: object) -> str:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        hidden_size=24,
        intermediate_size=52,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **options,  # pyright: ignore[reportArgumentType]
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)
