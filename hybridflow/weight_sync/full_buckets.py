"""Whole HuggingFace tensors in buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hybridflow.weight_sync.layout import hf_shapes


@dataclass(frozen=True)
class FullBucket:
    """Whole tensors, one behind the other in `payload` (uint8), each at a multiple of its item's
    size; `dtypes` as in config.json ("float32")."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    payload: Tensor


def buckets(
    weights: Iterable[tuple[str, Tensor]], config: Mapping[str, Any], limit: int
) -> Iterator[FullBucket]:
    """`weights` in buckets of at most `limit` bytes, or of one tensor that is larger.

    Two buffers on the weights' device take turns: a bucket's payload is good until the next but
    one is asked for. What the config does not name, a tied head, is left out.
    """
    shapes = hf_shapes(config)
    elements = sum(prod(shape) for shape in shapes.values())
    buffers = [torch.empty(0, dtype=torch.uint8)] * 2
    held: list[tuple[str, str, tuple[int, ...]]] = []
    turn = at = 0

    def whole() -> FullBucket:
        names, dtypes, sizes = zip(*held, strict=True)
        return FullBucket(names, dtypes, sizes, buffers[turn][:at])

    for name, tensor in weights:
        if name not in shapes:
            continue
        end = at + tensor.nbytes
        if held and (end > min(limit, len(buffers[turn])) or at % tensor.itemsize):
            yield whole()
            turn, at, held = 1 - turn, 0, []
        room = max(tensor.nbytes, min(limit, elements * tensor.itemsize))
        if not held and len(buffers[turn]) < room:
            buffers[turn] = torch.empty(room, dtype=torch.uint8, device=tensor.device)
        area = buffers[turn][at : at + tensor.nbytes]
        area.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        held.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        at += tensor.nbytes
    if held:
        yield whole()
