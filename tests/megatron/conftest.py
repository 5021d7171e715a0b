"""Tiny models whose dimensions are all distinct, in HuggingFace format."""

from pathlib import Path
from typing import Any

import pytest
import torch

_COMMON: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 52,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS: dict[str, Any] = {
    "vocab_size": 37,
    "moe_intermediate_size": 20,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Untied; 37 ids, so the vocabulary is padded at TP 2."""
    return _qwen3(tmp_path_factory.mktemp("qwen3"), vocab_size=37, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tied_qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tied embeddings, which first and last pipeline stage share."""
    return _qwen3(tmp_path_factory.mktemp("tied"), vocab_size=42, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Experts in each of three layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_hidden_layers=3,
        num_experts=6,
        norm_topk_prob=True,
        **_COMMON | _EXPERTS | _GROUPED,
    )
    return _save(Qwen3MoeForCausalLM, config, tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="session")
def tiny_deepseek_v3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Latent attention; a dense layer, then one with experts, shared ones among them."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        num_hidden_layers=2,
        num_key_value_heads=6,
        q_lora_rank=18,
        kv_lora_rank=28,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        **_COMMON | _EXPERTS,
    )
    return _save(DeepseekV3ForCausalLM, config, tmp_path_factory.mktemp("deepseek_v3"))


def _qwen3(folder: Path, **options: Any) -> str:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(num_hidden_layers=2, **_COMMON | _GROUPED | options)
    return _save(Qwen3ForCausalLM, config, folder)


def _save(model_class: Any, config: Any, folder: Path) -> str:
    torch.manual_seed(3)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return str(folder)
