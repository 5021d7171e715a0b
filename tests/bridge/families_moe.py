"""Tiny models of the families with experts."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.bridge import parity, tiny

_COMMON = {k: v for k, v in tiny.SIZES.items() if k != "head_dim"} | {
    "hidden_size": 40,
    "initializer_range": 0.12,
    "num_experts_per_tok": 3,
}
_WIDTH = {"moe_intermediate_size": 28}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    # So that one pair of components turns as trained, one is stretched, one lies between.
    "beta_fast": 0.25,
    "beta_slow": 0.01,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_LATENT = _WIDTH | {
    "num_key_value_heads": 4,
    "q_lora_rank": 22,
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    # The norms of the latents must not take it.
    "rms_norm_eps": 0.05,
}
_GROUPS = {"n_group": 3, "topk_group": 2, "rope_parameters": YARN}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 6, "head_dim": 16}),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        {
            **_WIDTH,
            "num_experts": 6,
            "shared_expert_intermediate_size": 44,
            "mlp_only_layers": [2],
        },
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        _WIDTH
        | {"num_experts": 6, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        _LATENT | _GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0},
    ),
    "deepseek_v2_lite": (
        transformers.DeepseekV2Config,
        _LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3": (transformers.DeepseekV3Config, _LATENT | _GROUPS),
    "moonlight": (
        transformers.DeepseekV3Config,
        _LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    ),
}


def fields(kind: str) -> dict[str, Any]:
    """A tiny model's config.json."""
    return _COMMON | CONFIGS[kind][1]


def model(kind: str, **changes: Any) -> Any:
    """A model with weights that no two tensors share; every buffer and norm takes part."""
    torch.manual_seed(7)
    config = CONFIGS[kind][0](**fields(kind) | changes)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.05)
    return made


def wanted(made: Any, folder: Path) -> parity.Wanted:
    """What transformers computes, its gradients under the names of a checkpoint's tensors.

    transformers holds a layer's experts in one parameter and writes them one by one.
    """
    found = parity.wanted(made)
    weights = {name: p.data for name, p in made.named_parameters()}
    assert set(found.gradients) == set(weights)
    for name, parameter in made.named_parameters():
        parameter.data = found.gradients[name]
    tiny.save(made, folder)
    for name, parameter in made.named_parameters():
        parameter.data = weights[name]
    # In float64, so that the norm over all of them is exact.
    found.gradients = {
        name: gradient.double()
        for name, gradient in parity.read_all(folder).items()
        if not name.endswith("e_score_correction_bias")
    }
    return found
