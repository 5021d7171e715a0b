"""Tiny random models, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB, EOS = 101, 1
# A server pads the width of these.
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {**_EXPERTS, "shared_expert_intermediate_size": 72, "norm_topk_prob": False},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 20}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {**_EXPERTS, "head_dim": 20, "norm_topk_prob": True},
    ),
}


def make_model(folder: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """A tiny random model whose sizes all differ; norms and biases are random as well.

    The vocabulary (101) and the intermediate size (80) are ones that a server pads.
    """
    config_class, model_class, extra = _FAMILIES[family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "eos_token_id": EOS,
        "bos_token_id": 0,
    }
    config = config_class(**{**sizes, **extra, **changes})
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.add_(noise)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path) -> PreTrainedModel:
    """The folder's model in transformers, float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Up to `count` greedy tokens by transformers' full forward pass, ended by EOS."""
    tokens: list[int] = []
    while len(tokens) < count and (not tokens or tokens[-1] != EOS):
        logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens


@torch.inference_mode()
def logprobs(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float = 1.0
) -> list[float]:
    """Log-probability of each response token under the temperature-scaled distribution."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    scaled = torch.log_softmax(logits / temperature, -1)
    return scaled.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()
