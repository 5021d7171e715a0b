"""Tiny models of the dense families and GPT-OSS."""

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
