"""The synthetic checkpoints of benchmarks/convert.py: 2 GB of random bfloat16, in two shards."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_bridge import translation
from megatron_bridge.mappings import huggingface_shapes

_BLOCK = 2**24 + 1
"""Random elements, drawn once. Tensors are read from it one behind another, round and round; as it
is odd, no two rows or experts are alike."""
_SHARD_BYTES = 2**30
_ITEM_BYTES = 2

_COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
}


@dataclass(frozen=True)
class Checkpoint:
    """A model to convert.

    Attributes:
        name: for people, and of its folder.
        config: config.json.
    """

    name: str
    config: dict[str, Any]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape."""
        return huggingface_shapes(translation.resolve(self.config))

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return _ITEM_BYTES * sum(math.prod(shape) for shape in self.shapes().values())


QWEN3 = Checkpoint(
    "qwen3",
    _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 14,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 73728,
    },
)
QWEN3_MOE = Checkpoint(
    "qwen3-moe",
    _COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
        "vocab_size": 75776,
    },
)
CHECKPOINTS = {checkpoint.name: checkpoint for checkpoint in (QWEN3, QWEN3_MOE)}


def make(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write the checkpoint, unless it is there from an earlier run; its folder."""
    made = folder / checkpoint.name
    config = json.dumps(checkpoint.config, indent=1)
    if (made / "config.json").is_file() and (made / "config.json").read_text() == config:
        return made
    aside = folder / f"{checkpoint.name}.new"
    for old in (aside, made):
        shutil.rmtree(old, ignore_errors=True)
    aside.mkdir()
    shards = list(_shards(checkpoint.shapes()))
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    random = _Random()
    for file, shapes in zip(files, shards, strict=True):
        tensors = {name: random.take(shape) for name, shape in shapes.items()}
        save_file(tensors, aside / file, {"format": "pt"})
    places = {name: file for file, shapes in zip(files, shards, strict=True) for name in shapes}
    index = {"metadata": {"total_size": checkpoint.bytes}, "weight_map": places}
    (aside / "model.safetensors.index.json").write_text(json.dumps(index))
    (aside / "config.json").write_text(config)
    aside.rename(made)
    return made


def warm(folder: Path) -> int:
    """Read every file, so that the page cache holds it; the bytes."""
    total = 0
    buffer = bytearray(2**24)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes.items():
        more = _ITEM_BYTES * math.prod(shape)
        if shard and size + more > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += more
    yield shard


class _Random:
    """Random bfloat16 at the speed of a copy."""

    def __init__(self) -> None:
        drawn = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))
        self._block = (0.02 * drawn).to(torch.bfloat16)
        self._at = 0

    def take(self, shape: tuple[int, ...]) -> Tensor:
        result = torch.empty(math.prod(shape), dtype=torch.bfloat16)
        done = 0
        while done < len(result):
            count = min(len(result) - done, _BLOCK - self._at)
            result[done : done + count] = self._block[self._at : self._at + count]
            done += count
            self._at = (self._at + count) % _BLOCK
        return result.view(shape)
