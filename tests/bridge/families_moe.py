"""Tiny models of the families with experts, and the fields of their published config.json."""

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


# As published, without what every family has.
PUBLISHED: dict[str, dict[str, Any]] = {
    "mistralai/Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "Qwen/Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.39.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "norm_topk_prob": False,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    "Qwen/Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "deepseek-ai/DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "deepseek-ai/DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}
PUBLISHED["moonshotai/Kimi-K2-Instruct"] = PUBLISHED["deepseek-ai/DeepSeek-V3"] | {
    "model_type": "kimi_k2",
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
}
PUBLISHED["moonshotai/Moonlight-16B-A3B"] = {
    name: value
    for name, value in PUBLISHED["deepseek-ai/DeepSeek-V3"].items()
    if name != "rope_scaling"
} | {
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "max_position_embeddings": 8192,
    "vocab_size": 163840,
}
