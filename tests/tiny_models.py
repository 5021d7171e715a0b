"""Tiny random models, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB, EOS = 101, 1
# A server pads the width of these.
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_NO_PADDING = {"pad_token_id": None}
# A server on the CPU loads no stacked gate and up that it would have to pad.
_STACKED = {**_NO_PADDING, "intermediate_size": 128}
# By transformers' model_type; a server runs each.
_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_LATENT,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
    },
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 28,
        "n_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "gemma3_text": {"head_dim": 20, "sliding_window": 64},
    "glm4": {"head_dim": 20, "attention_bias": True, **_STACKED},
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "olmo2": _NO_PADDING,
    "phi3": _STACKED,
    "qwen2": {},
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 72,
        "norm_topk_prob": False,
    },
    "qwen3": {"head_dim": 20},
    "qwen3_moe": {**_EXPERTS, "num_experts": 6, "head_dim": 20, "norm_topk_prob": True},
}


def families() -> list[str]:
    """Every family of `make_model`."""
    return list(_FAMILIES)


def make_model(folder: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """A tiny random model whose sizes all differ; norms and biases are random as well.

    The vocabulary (101) and the intermediate size (80) are ones that a server pads.
    """
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
    config = AutoConfig.for_model(family, **{**sizes, **_FAMILIES[family], **changes})
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 1:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
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
