"""Llama 2 and 3, SmolLM2 and other dense models of that class."""

from megatron_bridge.models import dense
from megatron_bridge.registry import Architecture

ARCHITECTURES = (
    Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        rows=dense.LLAMA,
        transformer=dense.transformer,
        required=dense.REQUIRED,
        defaults=dense.DEFAULTS,
        harmless=dense.HARMLESS,
        ignored=dense.IGNORED,
        features=dense.features,
        refusals=dense.refusals(dense.DEFAULTS),
        models="Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2",
    ),
)
