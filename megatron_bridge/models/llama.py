"""Llama 2 and 3, SmolLM2 and other dense models of that class."""

from megatron_bridge.models import dense
from megatron_bridge.registry import Architecture

ARCHITECTURES = (
    Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        rows=(
            dense.EMBEDDING,
            dense.INPUT_NORM,
            dense.QKV,
            dense.ATTENTION_OUTPUT,
            *dense.GATED_MLP,
            *dense.OUTPUT,
        ),
        transformer=dense.transformer,
        required=dense.REQUIRED,
        defaults=dense.DEFAULTS,
        harmless=dense.HARMLESS,
        ignored=dense.IGNORED,
        refusals=dense.rotary_problems,
    ),
)
