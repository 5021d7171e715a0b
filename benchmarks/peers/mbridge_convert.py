"""mbridge's side of benchmarks/convert.py, on the same live models as this project's side.

mbridge loads and saves live models alone; a Megatron checkpoint of them is megatron-core's part.
It knows the layers of transformer-engine, which need a GPU; those of the CPU have other names for
three kinds of weights, which are told to it here. The rest is mbridge as it is.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mbridge import AutoBridge
from mbridge.core import register_model
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core import dist_checkpointing

from benchmarks.convert_jobs import build, import_all, written
from benchmarks.convert_ranks import Prepared, on_ranks, touch
from benchmarks.convert_server import serve

_NORMS = {
    "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
}
_EXPERT = "model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
_EXPERT_PARTS = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}


@register_model("qwen3")
class Dense(Qwen3Bridge):
    """Qwen3 with norms outside the linear layers."""

    _OTHER_MAPPING = _NORMS
    _MLP_MAPPING = {**Qwen3Bridge._MLP_MAPPING, **_NORMS}


@register_model("qwen3_moe")
class Experts(Qwen3MoEBridge):
    """Qwen3-MoE with norms outside the linear layers, and experts one by one."""

    _OTHER_MAPPING = _NORMS
    _MLP_MAPPING = {**Qwen3MoEBridge._MLP_MAPPING, **_NORMS}

    def _build_config(self) -> Any:
        self.extra_args = {**self.extra_args, "moe_grouped_gemm": False}
        return super()._build_config()

    def _weight_name_mapping_mlp(self, name: str) -> list[str]:
        if ".local_experts." not in name:
            return super()._weight_name_mapping_mlp(name)
        layer, (expert, linear) = name.split(".")[2], name.split(".")[6:8]
        return [
            _EXPERT.format(layer=layer, expert=expert, projection=projection)
            for projection in _EXPERT_PARTS[linear]
        ]


def _bridge(folder: str) -> Any:
    return AutoBridge.from_pretrained(folder)


def load(source: str, tp: int, pp: int, repeats: int) -> dict[str, Any]:
    """`load_weights`."""

    def prepare() -> Prepared:
        model = build(source, tp, pp)
        bridge = _bridge(source)

        def work() -> None:
            with torch.no_grad():
                bridge.load_weights([model], source)

        return Prepared(work, list(model.parameters()))

    return on_ranks(tp * pp, prepare, repeats)


def to_megatron(source: str, destination: str) -> dict[str, Any]:
    """`load_weights` onto a model that is there, then megatron-core's save."""
    model = _model(source)
    bridge = _bridge(source)

    def convert() -> None:
        with torch.no_grad():
            bridge.load_weights([model], source)
        Path(destination).mkdir()
        dist_checkpointing.save(model.sharded_state_dict(), destination)

    return written(destination, convert)


def to_huggingface(source: str, destination: str, origin: str) -> dict[str, Any]:
    """megatron-core's load onto a model that is there, then `save_weights`.

    Args:
        source: what ``to_megatron`` made.
        destination: a HuggingFace folder.
        origin: the HuggingFace folder that ``source`` was made of: its index says what goes into
            which file.
    """
    model = _model(origin)
    bridge = _bridge(origin)
    bridge.safetensor_io = bridge._get_safetensor_io(origin)

    def convert() -> None:
        with torch.no_grad():
            model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), source))
            bridge.save_weights([model], destination)

    return written(destination, convert)


def _model(folder: str) -> Any:
    """A live model in a process group of its own, its memory touched."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = build(folder, 1, 1)
    touch(list(model.parameters()))
    return model


JOBS = {"load": load, "to_megatron": to_megatron, "to_huggingface": to_huggingface}

if __name__ == "__main__":
    import_all()
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    serve(JOBS)
