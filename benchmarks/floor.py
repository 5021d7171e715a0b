"""The least time that a GRPO step's matrix products take on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZE = 2048
_TRIES = 6
TRAINING_FORWARDS = 3
"""A backward pass costs two forward passes."""


@dataclass(frozen=True)
class Floor:
    """Seconds that generation and training cannot beat at the matmul rate."""

    generation: float
    training: float


class ModelCost:
    """Floating-point operations of a dense decoder, from its ``config.json``."""

    def __init__(self, config: dict[str, Any]) -> None:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        mlp = 3 * hidden * config["intermediate_size"]
        layers = config["num_hidden_layers"]
        self._per_token = 2 * layers * (attention + mlp)
        self._per_pair = 4 * layers * heads * head_dim
        self._per_logits = 2 * hidden * config["vocab_size"]

    def forward(self, tokens: int, pairs: int, logits: int) -> int:
        """Of ``tokens`` tokens, which attend to ``pairs`` (query, key) pairs in all, with logits
        at ``logits`` of them."""
        return self._per_token * tokens + self._per_pair * pairs + self._per_logits * logits


def step_floor(
    config: dict[str, Any], prompts: Sequence[int], responses: Sequence[int], rate: float
) -> Floor:
    """Of one step: ``prompts`` are the P prompts' lengths, ``responses`` the P x G samples'.

    Generation is a forward pass with a KV cache, training three forward passes. A prompt is
    computed once for all its samples, and no padding is.

    Args:
        rate: the machine's, in floating-point operations per second.
    """
    cost = ModelCost(config)
    samples = len(responses) // len(prompts)
    told = sum(prompts)
    causal = sum(n * (n + 1) // 2 for n in prompts)
    of_prompt = [n for n in prompts for _ in range(samples)]
    fed = sum(responses) - len(responses)  # the last token of a response is never fed back
    pairs = causal + sum(
        _response_pairs(prompt, response - 1)
        for prompt, response in zip(of_prompt, responses, strict=True)
    )
    generation = cost.forward(told + fed, pairs, len(prompts) + fed)
    training = cost.forward(told + fed, pairs, sum(responses))
    return Floor(generation / rate, TRAINING_FORWARDS * training / rate)


def _response_pairs(prompt: int, response: int) -> int:
    return response * prompt + response * (response + 1) // 2


def read_config(model: Path) -> dict[str, Any]:
    """A model folder's ``config.json``."""
    return json.loads((model / "config.json").read_text())


def matmul_rate(threads: int) -> float:
    """Best measured rate of a float32 matrix product, in operations per second."""
    import torch

    torch.set_num_threads(threads)
    left, right = torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)
    out = torch.empty(_SIZE, _SIZE)
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        torch.matmul(left, right, out=out)
        seconds.append(time.perf_counter() - start)
    return 2 * _SIZE**3 / min(seconds)
