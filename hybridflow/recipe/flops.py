"""Floating-point operations of a model, from its config.json, and devices' peaks. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from megatron_bridge.mappings import huggingface_shapes
from megatron_bridge.translation import resolve


@dataclass(frozen=True)
class Work:
    """What a forward pass goes over.

    Attributes:
        tokens: inputs of the layers.
        pairs: of a token and one that it attends to, itself included.
        labels: positions that the output layer sees.
    """

    tokens: int
    pairs: int
    labels: int

    @staticmethod
    def of(prompts: Sequence[int], responses: Sequence[int]) -> Work:
        """Of prompts and their responses by length, as many to each; a prompt counts once."""
        groups = len(responses) // max(len(prompts), 1)
        inputs = [max(n - 1, 0) for n in responses]  # nothing follows the last token
        owners = [prompts[index // groups] for index in range(len(responses))]
        before = sum(n * (n + 1) // 2 for n in prompts)
        after = sum(n * p + n * (n + 1) // 2 for n, p in zip(inputs, owners, strict=True))
        return Work(sum(prompts) + sum(inputs), before + after, sum(responses))


_HEADS = ("lm_head.weight", "score.weight")


class ModelFlops:
    """Counts two operations for each multiplication by a weight and each of attention's products
    under the causal mask; norms and activations are left out. Of experts, those that are used.

    Args:
        config: of the model.
        outputs: numbers that it gives a token; None: its vocabulary.
    """

    def __init__(self, config: Mapping[str, Any], outputs: int | None = None) -> None:
        config = resolve(dict(config))
        shapes = huggingface_shapes(config)
        used = _share_of_experts(config)
        self._weights = 0.0
        for name, shape in shapes.items():
            if len(shape) > 1 and "embed" not in name and name not in _HEADS:
                self._weights += prod(shape) * (used if ".experts" in name else 1.0)
        self._head = (outputs or config["vocab_size"]) * config["hidden_size"]
        heads, size = config["num_attention_heads"], config.get("head_dim")
        size = size or config["hidden_size"] // heads
        query = config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0) or size
        self._pair = (
            config["num_hidden_layers"] * heads * (query + (config.get("v_head_dim") or size))
        )

    def forward(self, work: Work) -> float:
        """Operations of one forward pass."""
        linear = self._weights * work.tokens + self._head * work.labels
        return 2.0 * (linear + self._pair * work.pairs)

    def training(self, work: Work) -> float:
        """Of a forward and a backward pass, which is twice as much."""
        return 3.0 * self.forward(work)


def _share_of_experts(config: Mapping[str, Any]) -> float:
    count = next(
        (
            config[key]
            for key in ("num_experts", "num_local_experts", "n_routed_experts")
            if config.get(key)
        ),
        0,
    )
    return config["num_experts_per_tok"] / count if count else 1.0


PEAK_TFLOPS: dict[str, tuple[float, float]] = {
    "B200": (2250.0, 75.0),
    "H200": (989.4, 66.9),
    "H100 PCIe": (756.0, 51.0),
    "H100": (989.4, 66.9),
    "H800": (989.4, 66.9),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "A10": (125.0, 31.2),
    "L4": (121.0, 30.3),
}
"""Dense bfloat16 and float32 TFLOP/s by the maker's data sheet; the first that a device's name
holds as words."""


def peak_flops(device: str, dtype: str) -> float | None:
    """Peak of a device by its name, in operations a second; None where it is not known."""
    words = f" {device.replace('-', ' ')} "
    for name, (half, single) in PEAK_TFLOPS.items():
        if f" {name} " in words:
            return 1e12 * (half if dtype == "bfloat16" else single)
    return None
