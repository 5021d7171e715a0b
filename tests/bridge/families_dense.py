"""Tiny models of the dense families and GPT-OSS, and fields of their published config.json."""

from copy import deepcopy
from typing import Any

import torch
import transformers

from tests.bridge import tiny

# The packs' longest sequences have 31 and 23 tokens: windows and trained lengths are shorter.
WINDOW = 7
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 7.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0 + i for i in range(3)],
    "long_factor": [9.0 + i for i in range(3)],
}
_GEMMA3_ROTARY = {
    "full_attention": LINEAR,
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]

CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama_linear": (transformers.LlamaConfig, {"rope_parameters": LINEAR}),
    "mistral": (transformers.MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": (
        transformers.Qwen2Config,
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
            "rope_parameters": YARN,
        },
    ),
    "qwen3": (transformers.Qwen3Config, {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "query_pre_attn_scalar": 50,
            "rope_parameters": _GEMMA3_ROTARY,
        },
    ),
    "phi3": (
        transformers.Phi3Config,
        {
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5},
            # Packs have sequences longer than this, and shorter ones.
            "original_max_position_embeddings": 16,
            "sliding_window": WINDOW,
            # Its class checks the factors against a head of hidden_size / num_attention_heads.
            "head_dim": 12,
        },
    ),
    "olmo2": (transformers.Olmo2Config, {}),
    "glm": (transformers.GlmConfig, {"rope_parameters": YARN}),
    "glm4": (transformers.Glm4Config, {}),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": WINDOW,
            "swiglu_limit": 0.3,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
}


def model(kind: str, **fields: Any) -> Any:
    """A model with weights that no two tensors share; every norm, bias and sink takes part."""
    make, own = CONFIGS[kind]
    torch.manual_seed(7)
    # transformers never trains the embedding of padding, and here it would be a real token's.
    sizes = tiny.SIZES | {"pad_token_id": None}
    config = make(**sizes | deepcopy(own | fields))  # transformers writes into rope_parameters
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if any(part in name for part in ("norm", "bias", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return made


def _published(kind: str, **fields: Any) -> dict[str, Any]:
    """As published: what all have, then the family's own."""
    return {
        "architectures": [kind],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.0",
        "use_cache": True,
        "tie_word_embeddings": False,
        **fields,
    }


def _sizes(
    hidden: int, ffn: int, layers: int, heads: int, groups: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
    }


_LONG = {
    "long_factor": [1.0 + i / 3 for i in range(48)],
    "short_factor": [1.0 + i / 97 for i in range(48)],
    "type": "longrope",
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": _published(
        "LlamaForCausalLM",
        model_type="llama",
        max_position_embeddings=4096,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_scaling=None,
        **_sizes(4096, 11008, 32, 32, 32, 32000),
    ),
    "meta-llama/Llama-3.1-8B": _published(
        "LlamaForCausalLM",
        model_type="llama",
        attention_bias=False,
        max_position_embeddings=131072,
        mlp_bias=False,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        rope_theta=500000.0,
        **_sizes(4096, 14336, 32, 32, 8, 128256),
    ),
    "mistralai/Mistral-7B-v0.1": _published(
        "MistralForCausalLM",
        model_type="mistral",
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        sliding_window=4096,
        **_sizes(4096, 14336, 32, 32, 8, 32000),
    ),
    "mistralai/Mistral-Nemo-Base-2407": _published(
        "MistralForCausalLM",
        model_type="mistral",
        head_dim=128,
        max_position_embeddings=128000,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        sliding_window=None,
        **_sizes(5120, 14336, 40, 32, 8, 131072),
    ),
    "Qwen/Qwen2.5-7B-Instruct with YaRN": _published(
        "Qwen2ForCausalLM",
        model_type="qwen2",
        max_position_embeddings=32768,
        max_window_layers=28,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        sliding_window=131072,
        use_sliding_window=False,
        **_sizes(3584, 18944, 28, 28, 4, 152064),
    ),
    "Qwen/Qwen3-0.6B": _published(
        "Qwen3ForCausalLM",
        model_type="qwen3",
        attention_bias=False,
        head_dim=128,
        max_position_embeddings=40960,
        max_window_layers=28,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        use_sliding_window=False,
        **_sizes(1024, 3072, 28, 16, 8, 151936) | {"tie_word_embeddings": True},
    ),
    "google/gemma-3-1b-it": {
        field: value
        for field, value in _published(
            "Gemma3ForCausalLM",
            model_type="gemma3_text",
            attention_bias=False,
            attn_logit_softcapping=None,
            cache_implementation="hybrid",
            final_logit_softcapping=None,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            max_position_embeddings=32768,
            query_pre_attn_scalar=256,
            rms_norm_eps=1e-6,
            rope_local_base_freq=10000,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=512,
            sliding_window_pattern=6,
            **_sizes(1152, 6912, 26, 4, 1, 262144),
        ).items()
        if field not in ("tie_word_embeddings", "hidden_act")
    },
    "microsoft/Phi-3-mini-4k-instruct": _published(
        "Phi3ForCausalLM",
        model_type="phi3",
        attention_bias=False,
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        embd_pdrop=0.0,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        resid_pdrop=0.0,
        rms_norm_eps=1e-5,
        rope_scaling=None,
        rope_theta=10000.0,
        sliding_window=2047,
        **_sizes(3072, 8192, 32, 32, 32, 32064),
    ),
    "microsoft/Phi-4-mini-instruct": _published(
        "Phi3ForCausalLM",
        model_type="phi3",
        attention_bias=False,
        embd_pdrop=0.0,
        full_attn_mod=1,
        interpolate_factor=1,
        lm_head_bias=False,
        max_position_embeddings=131072,
        mlp_bias=False,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        resid_pdrop=0.0,
        rms_norm_eps=1e-5,
        rope_scaling=_LONG,
        rope_theta=10000.0,
        sliding_window=262144,
        **_sizes(3072, 8192, 32, 24, 8, 200064) | {"tie_word_embeddings": True},
    ),
    "allenai/OLMo-2-1124-7B": _published(
        "Olmo2ForCausalLM",
        model_type="olmo2",
        attention_bias=False,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=500000,
        **_sizes(4096, 11008, 32, 32, 32, 100352),
    ),
    "zai-org/GLM-4-9B-0414": _published(
        "Glm4ForCausalLM",
        model_type="glm4",
        attention_bias=False,
        head_dim=128,
        max_position_embeddings=32768,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        **_sizes(4096, 13696, 40, 32, 2, 151552),
    ),
    "zai-org/glm-4-9b-chat-hf": _published(
        "GlmForCausalLM",
        model_type="glm",
        attention_bias=True,
        head_dim=128,
        max_position_embeddings=131072,
        partial_rotary_factor=0.5,
        rms_norm_eps=1.5625e-07,
        rope_theta=10000.0,
        **_sizes(4096, 13696, 40, 32, 2, 151552),
    ),
    "openai/gpt-oss-20b": _published(
        "GptOssForCausalLM",
        model_type="gpt_oss",
        attention_bias=True,
        experts_per_token=4,
        head_dim=64,
        initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"] * 12,
        max_position_embeddings=131072,
        num_experts_per_tok=4,
        num_local_experts=32,
        output_router_logits=False,
        quantization_config={
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
            "quant_method": "mxfp4",
        },
        rms_norm_eps=1e-5,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        rope_theta=150000,
        router_aux_loss_coef=0.9,
        sliding_window=128,
        swiglu_limit=7.0,
        **_sizes(2880, 2880, 24, 64, 8, 201088),
    ),
}
