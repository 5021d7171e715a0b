"""Layout transforms between HuggingFace's tensors and Megatron's. Pure; each has its inverse.

All of them commute with tensor parallelism: applied to one rank's parts of the HuggingFace tensors
they give that rank's part of the Megatron tensor.
"""

import torch
from torch import Tensor

from megatron_bridge.registry import Kind


def to_megatron(kind: Kind, tensors: list[Tensor], head_dim: int, rows: int) -> Tensor:
    """One Megatron tensor from its HuggingFace tensors.

    Args:
        kind: the transform.
        tensors: as the registry's row lists them: q, k, v or gate, up or the only one.
        head_dim: size of an attention head.
        rows: rows that the Megatron tensor has; only the vocabulary is padded to reach it.
    """
    if kind is Kind.QKV:
        q, k, v = tensors
        return merge_qkv(q, k, v, head_dim)
    if kind is Kind.GATED:
        gate, up = tensors
        return merge_gated(gate, up)
    (tensor,) = tensors
    return pad_vocabulary(tensor, rows) if kind is Kind.VOCABULARY else tensor


def to_huggingface(kind: Kind, tensor: Tensor, head_dim: int, rows: list[int]) -> list[Tensor]:
    """The inverse of ``to_megatron``; ``rows`` are those of each HuggingFace tensor."""
    if kind is Kind.QKV:
        return list(split_qkv(tensor, rows[0], rows[1], head_dim))
    if kind is Kind.GATED:
        return list(split_gated(tensor))
    return [tensor[: rows[0]]] if kind is Kind.VOCABULARY else [tensor]


def merge_qkv(q: Tensor, k: Tensor, v: Tensor, head_dim: int) -> Tensor:
    """Interleave projections by key-value group: (the group's queries, its key, its value) ...

    Args:
        q: [heads * head_dim, ...]: a weight [.., hidden] or a bias.
        k: [kv_heads * head_dim, ...]; v: the same.

    Returns:
        [(heads + 2 * kv_heads) * head_dim, ...]
    """
    groups = k.shape[0] // head_dim
    grouped = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def split_qkv(qkv: Tensor, q_rows: int, k_rows: int, head_dim: int) -> tuple[Tensor, ...]:
    """The inverse of ``merge_qkv``: q, k, v, each contiguous."""
    groups = k_rows // head_dim
    grouped = qkv.reshape(groups, -1, *qkv.shape[1:])
    parts = grouped.split([q_rows // groups, head_dim, head_dim], dim=1)
    return tuple(part.flatten(0, 1).contiguous() for part in parts)


def merge_gated(gate: Tensor, up: Tensor) -> Tensor:
    """Stack the gate projection on the up projection: [2 * ffn, ...]."""
    return torch.cat([gate, up])


def split_gated(fc1: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of ``merge_gated``."""
    gate, up = fc1.chunk(2)
    return gate.contiguous(), up.contiguous()


def padded_vocabulary(size: int, tp: int) -> int:
    """The vocabulary's size padded only as far as ``tp`` needs it."""
    return -(-size // tp) * tp


def pad_vocabulary(tensor: Tensor, rows: int) -> Tensor:
    """Append rows of zeros, up to ``rows``; ``tensor[:size]`` takes them off again."""
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
