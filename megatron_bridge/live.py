"""The bridge's interface to live models: build, load, export, save."""

from megatron_bridge.huggingface.folder import load_hf_config
from megatron_bridge.live_export import export_weights, local_weights
from megatron_bridge.live_load import load_weights
from megatron_bridge.live_model import build_chunks, build_model, global_name, origin, unwrap
from megatron_bridge.live_save import save_pretrained
from megatron_bridge.translation import with_value_head

__all__ = [
    "build_chunks",
    "build_model",
    "export_weights",
    "global_name",
    "load_hf_config",
    "load_weights",
    "local_weights",
    "origin",
    "save_pretrained",
    "unwrap",
    "with_value_head",
]
