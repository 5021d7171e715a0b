"""Streams a parallel model's weights as whole HuggingFace tensors to rank 0."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge import regions, translation
from megatron_bridge.live_model import Model, origin, parameters, placement
from megatron_bridge.mappings import Weight, huggingface_shapes, weights
from megatron_bridge.reading import in_huggingface_order
from megatron_bridge.registry import HfConfig
from megatron_bridge.runtime import device
from megatron_bridge.sharding import Owner, Placement, holdings, local_shape


def export_weights(model: Model, hf_config: HfConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (HuggingFace name, whole tensor) on rank 0, in the model's order and dtype.

    Collective: every rank calls it and exhausts it; the other ranks yield nothing. One parameter
    travels at a time. A yielded tensor may share the live parameter's memory: copy it before the
    model changes. No exchange waits longer than the timeout that ``init_process_group`` was given.

    Args:
        model: from ``build_model``, wrapped or not; or the chunks of ``build_chunks``.
        hf_config: config.json of the model.

    Raises:
        ValueError: for a parameter that no row covers, or when the config is not the model's.
        RuntimeError: a peer's process ended or did not come; names what was on its way.
    """
    config = translation.resolve(hf_config)
    made = origin(model)
    shapes = huggingface_shapes(config)
    if shapes != huggingface_shapes(translation.resolve(made.hf_config)):
        raise ValueError("hf_config is not the config that this model was built with")
    held: dict[tuple[str, int | None], Tensor] = {}
    for one in parameters(model):  # a tied embedding held twice: the first is the owner's
        held.setdefault((one.weight.key, one.weight.expert), one.tensor.detach())
    where = placement(config, made.layout)
    unfinished = _Unfinished(shapes)
    for weight in weights(config):
        owners = where.owners(weight)
        if dist.get_rank() == 0:
            for owner in owners:
                tensor = _receive(weight, owner, held, where, made.dtype)
                yield from unfinished.add(weight, owner, len(owners), tensor, where)
        elif any(owner.rank == dist.get_rank() for owner in owners):
            with _naming(weight, "to rank 0"):
                dist.send(held[weight.key, weight.expert].contiguous(), dst=0)
    assert dist.get_rank() != 0 or not unfinished.left, unfinished.left.keys()


def local_weights(model: Model) -> dict[int, Tensor]:
    """This rank's parameters by their weight's number in ``mappings.weights``; live, not copies.

    A rank that holds a tied embedding twice gives the first.
    """
    config = translation.resolve(origin(model).hf_config)
    number = {(weight.key, weight.expert): n for n, weight in enumerate(weights(config))}
    held: dict[int, Tensor] = {}
    for one in parameters(model):
        held.setdefault(number[one.weight.key, one.weight.expert], one.tensor)
    return held


def weight_dtypes(hf_config: HfConfig, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of every exported tensor of a model in ``dtype``."""
    return {
        part.name: dtype_of(weight, dtype)
        for weight in weights(translation.resolve(hf_config))
        for part in weight.parts
    }


def dtype_of(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    """A weight's dtype in a model of ``dtype``: some buffers stay in float32."""
    return dtype if weight.row.dtype is None else device.dtype(weight.row.dtype)


def _receive(
    weight: Weight,
    owner: Owner,
    held: dict[tuple[str, int | None], Tensor],
    where: Placement,
    dtype: torch.dtype,
) -> Tensor:
    """The owner's tensor, on rank 0."""
    if owner.rank == 0:
        return held[weight.key, weight.expert]
    shape = local_shape(weight, where.tensor_parallel(weight))
    tensor = torch.empty(shape, dtype=dtype_of(weight, dtype), device=device.device())
    with _naming(weight, f"from rank {owner.rank}"):
        dist.recv(tensor, src=owner.rank)
    return tensor


@contextmanager
def _naming(weight: Weight, way: str) -> Iterator[None]:
    """Says what an exchange that fails was about."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"exporting '{weight.key}' {way} failed: that rank's process has ended, or it did not "
            f"come within the timeout of init_process_group ({error})"
        ) from error


class _Unfinished:
    """HuggingFace tensors of which some elements are still to come."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self.left: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}

    def add(
        self, weight: Weight, owner: Owner, owners: int, tensor: Tensor, where: Placement
    ) -> Iterator[tuple[str, Tensor]]:
        """Put one owner's tensor in its places; yields what that completes."""
        if owners == 1 and self._is_plain(weight, tensor):
            yield weight.parts[0].name, tensor
            return
        for holding in holdings(weight, where.tensor_parallel(weight), owner.place):
            rows = tensor[holding.rows[0] : holding.rows[1]].view(regions.lengths(holding.box))
            for piece in weight.pieces(holding.box):
                inside = rows[regions.slices(regions.relative(piece.megatron, holding.box))]
                part = weight.parts[piece.part]
                target = self._tensor(part.name, tensor)
                view = target[part.rows[0] : part.rows[1]].view(part.flat_sizes)
                view[regions.slices(piece.huggingface)] = in_huggingface_order(inside, piece)
                self.left[part.name] -= regions.volume(piece.huggingface)
        for name in dict.fromkeys(part.name for part in weight.parts):
            if self.left.get(name) == 0:
                del self.left[name]
                yield name, self._tensors.pop(name)

    def _is_plain(self, weight: Weight, tensor: Tensor) -> bool:
        """The parameter is the HuggingFace tensor."""
        part = weight.parts[0]
        return (
            len(weight.parts) == 1
            and part.axes == weight.axes
            and tensor.shape == self._shapes[part.name]
        )

    def _tensor(self, name: str, like: Tensor) -> Tensor:
        if name not in self._tensors:
            shape = self._shapes[name]
            self._tensors[name] = torch.empty(shape, dtype=like.dtype, device=like.device)
            self.left[name] = math.prod(shape)
        return self._tensors[name]
