"""What a node gives, held against its signature: mistakes that would train in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.recipe.axes import Axis, FieldType
from hybridflow.recipe.graph import Graph, Node

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_WANTED = {
    "float": ((torch.float32,), "float32: make it so with `.float()`"),
    "int": (_INTEGERS, "whole numbers, such as int64"),
    "ids": ((torch.int64,), "int64"),
    "bool": ((torch.bool,), "bool: compare, such as `mask != 0`"),
}


def require_sound(node: str, types: Mapping[str, FieldType], batch: Batch) -> None:
    """The outputs of a node have their declared axis and element type, and are numbers.

    Raises:
        ValueError: names node, field, place and fix.
    """
    for name, kind in types.items():
        if name not in batch or kind.axis is Axis.RUN:
            continue
        if batch.axes[name] is not kind.axis:
            raise ValueError(
                f"node '{node}' gives '{name}' by {batch.axes[name]}; it is by {kind.axis}"
            )
        data = batch[name]
        values = data.values if isinstance(data, Ragged) else data
        if isinstance(values, Tensor):
            _require_type(node, name, kind, values)
            _require_finite(node, name, data, values)


def _require_type(node: str, name: str, kind: FieldType, values: Tensor) -> None:
    wanted, fix = _WANTED.get(kind.dtype, ((), ""))
    if wanted and values.dtype not in wanted:
        told = str(values.dtype).removeprefix("torch.")
        raise ValueError(f"node '{node}' gives '{name}' as {told}; it is {fix}")
    if wanted and values.dim() != 1:
        raise ValueError(
            f"node '{node}' gives '{name}' of shape {list(values.shape)}; it has one number for "
            "each sample or token, without padding (`Ragged.from_rows` for tokens)"
        )


def _require_finite(node: str, name: str, data: Any, values: Tensor) -> None:
    if not values.is_floating_point() or bool(values.isfinite().all()):
        return
    place = int((~values.isfinite()).nonzero()[0])
    where = f"sample {place}"
    if isinstance(data, Ragged):
        row = int(torch.searchsorted(data.offsets, place, right=True)) - 1
        where = f"sample {row}, token {place - int(data.offsets[row])}"
    raise ValueError(
        f"node '{node}' gives {float(values[place])} in '{name}' for {where}; look at what it was "
        "made from"
    )


def old_is_current(graph: Graph, node: Node) -> bool:
    """Whether an update must find its ``old_logprobs`` equal to its own at its first optimizer
    step: the same role gave them in this step, and has not been updated since."""
    field = node.inputs.get("old_logprobs")
    maker = graph.producers.get(field or "")
    if maker is None or node.delay or (maker.role, maker.call) != (node.role, "logprobs"):
        return False
    order = [n.name for n in graph.order]
    first, last = order.index(maker.name), order.index(node.name)
    between = [graph.node(name) for name in order[first + 1 : last]]
    return not any((n.role, n.call) == (node.role, "update") for n in between)
