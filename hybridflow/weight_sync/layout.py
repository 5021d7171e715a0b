"""A server's own parameter layout, declared as slices of HuggingFace tensors.

SGLang fuses q, k and v into one parameter, gate and up into another, pads the vocabulary and
(on the CPU) the intermediate size, and splits all of it over tensor-parallel ranks. The local
engine keeps exactly the layout of a CPU server with one rank. Knowing it lets a trainer compute
the digest of a server's live parameters without asking for the bytes.

Letters: H query heads, G KV heads, D head size, E hidden, I intermediate, V vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from hybridflow.recipe.names import advice

_ARCHITECTURES = {
    # HuggingFace class: (q_norm and k_norm, bias on q, k and v)
    "LlamaForCausalLM": (False, False),
    "Qwen2ForCausalLM": (False, True),
    "Qwen3ForCausalLM": (True, False),
}


@dataclass(frozen=True)
class Piece:
    """`length` rows of `source` from `source_start`, placed at `start`, along dimension `dim`."""

    source: str
    dim: int
    start: int
    length: int
    source_start: int


@dataclass(frozen=True)
class Parameter:
    """One parameter of one rank. What no piece covers is zero (padding)."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def build(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The parameter's tensor from full HuggingFace tensors; contiguous, of `dtype`."""
        if self._is_whole(weights):
            return weights[self.pieces[0].source].to(dtype).contiguous()
        covered = sum(piece.length for piece in self.pieces)
        dim = self.pieces[0].dim if self.pieces else 0
        make = torch.empty if covered == self.shape[dim] else torch.zeros
        target = make(self.shape, dtype=dtype)
        for piece in self.pieces:
            self.copy_piece(target, piece, weights[piece.source])
        return target

    def _is_whole(self, weights: Mapping[str, torch.Tensor]) -> bool:
        return len(self.pieces) == 1 and tuple(weights[self.pieces[0].source].shape) == self.shape

    @staticmethod
    def copy_piece(target: torch.Tensor, piece: Piece, source: torch.Tensor) -> None:
        """Copy `piece` of the full HuggingFace tensor `source` to its place in `target`."""
        rows = source.narrow(piece.dim, piece.source_start, piece.length)
        target.narrow(piece.dim, piece.start, piece.length).copy_(rows)


@dataclass(frozen=True)
class Geometry:
    """The sizes that a dense decoder's config states, checked."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    layers: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool


def geometry(config: Mapping[str, Any]) -> Geometry:
    """Read `config.json`'s content; ValueError for an architecture whose layout is not known."""
    name = (config.get("architectures") or ["none"])[0]
    if name not in _ARCHITECTURES:
        raise ValueError(
            f"the server layout of {name!r} is not known; {advice(name, _ARCHITECTURES)} "
            "Add a row to hybridflow/weight_sync/layout.py."
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ValueError(
                f"config.json sets {key}: true, which the layout of {name} does not cover. "
                "Add its parameters to hybridflow/weight_sync/layout.py."
            )
    qk_norm, qkv_bias = _ARCHITECTURES[name]
    heads = config["num_attention_heads"]
    return Geometry(
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        layers=config["num_hidden_layers"],
        tied=bool(config.get("tie_word_embeddings")),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
    )


def hf_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every HuggingFace tensor of the model and its shape; a tied `lm_head` is not one."""
    g = geometry(config)
    q_rows, kv_rows = g.heads * g.head_dim, g.kv_heads * g.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (g.vocab, g.hidden)}
    for layer in range(g.layers):
        block = f"model.layers.{layer}."
        attention, mlp = block + "self_attn.", block + "mlp."
        shapes[block + "input_layernorm.weight"] = (g.hidden,)
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            shapes[f"{attention}{name}.weight"] = (rows, g.hidden)
            if g.qkv_bias:
                shapes[f"{attention}{name}.bias"] = (rows,)
        shapes[attention + "o_proj.weight"] = (g.hidden, q_rows)
        if g.qk_norm:
            shapes[attention + "q_norm.weight"] = (g.head_dim,)
            shapes[attention + "k_norm.weight"] = (g.head_dim,)
        shapes[block + "post_attention_layernorm.weight"] = (g.hidden,)
        shapes[mlp + "gate_proj.weight"] = (g.intermediate, g.hidden)
        shapes[mlp + "up_proj.weight"] = (g.intermediate, g.hidden)
        shapes[mlp + "down_proj.weight"] = (g.hidden, g.intermediate)
    shapes["model.norm.weight"] = (g.hidden,)
    if not g.tied:
        shapes["lm_head.weight"] = (g.vocab, g.hidden)
    return shapes


def server_layout(config: Mapping[str, Any], tp: int = 1, rank: int = 0) -> dict[str, Parameter]:
    """The parameters of rank `rank` of `tp` of a CPU server, in the model's order."""
    g = geometry(config)
    _check_tp(g, tp)
    shapes = hf_shapes(config)
    layout: dict[str, Parameter] = {}
    for name in shapes:
        target, make = _target(name)
        if target not in layout:
            layout[target] = make(g, name, shapes, tp, rank)
    return layout


def parameter_bytes(layout: Mapping[str, Parameter], dtype: torch.dtype) -> int:
    """Bytes of one rank's parameters in `dtype`."""
    return sum(prod(parameter.shape) for parameter in layout.values()) * dtype.itemsize


def _check_tp(g: Geometry, tp: int) -> None:
    if g.heads % tp or g.kv_heads % tp:
        raise ValueError(
            f"rollout tp={tp} must divide the model's {g.heads} attention heads and "
            f"{g.kv_heads} KV heads. Choose a common divisor."
        )


def _target(name: str):
    """The server parameter that holds HuggingFace tensor `name`, and the rule that builds it."""
    for part, fused in (("q_proj", "qkv_proj"), ("k_proj", "qkv_proj"), ("v_proj", "qkv_proj")):
        if f".{part}." in name:
            return name.replace(part, fused), _qkv
    for part in ("gate_proj", "up_proj"):
        if f".{part}." in name:
            return name.replace(part, "gate_up_proj"), _gate_up
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return name, _vocabulary
    if name.endswith("o_proj.weight"):
        return name, _o_proj
    if name.endswith("down_proj.weight"):
        return name, _down
    return name, _replicated


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def _overlap(total: int, start: int, length: int) -> int:
    """How many of the `length` rows from `start` exist among `total` rows."""
    return max(0, min(total, start + length) - start)


def _replicated(g: Geometry, name: str, shapes, tp: int, rank: int) -> Parameter:
    shape = shapes[name]
    return Parameter(shape, (Piece(name, 0, 0, shape[0], 0),))


def _vocabulary(g: Geometry, name: str, shapes, tp: int, rank: int) -> Parameter:
    rows = _round_up(g.vocab, 64) // tp
    real = _overlap(g.vocab, rank * rows, rows)
    pieces = (Piece(name, 0, 0, real, rank * rows),) if real else ()
    return Parameter((rows, g.hidden), pieces)


def _qkv(g: Geometry, name: str, shapes, tp: int, rank: int) -> Parameter:
    kind = "weight" if name.endswith("weight") else "bias"
    prefix = name.rsplit(".", 2)[0]
    q, kv = g.heads // tp * g.head_dim, g.kv_heads // tp * g.head_dim
    pieces = (
        Piece(f"{prefix}.q_proj.{kind}", 0, 0, q, rank * q),
        Piece(f"{prefix}.k_proj.{kind}", 0, q, kv, rank * kv),
        Piece(f"{prefix}.v_proj.{kind}", 0, q + kv, kv, rank * kv),
    )
    return Parameter((q + 2 * kv, *shapes[name][1:]), pieces)


def _o_proj(g: Geometry, name: str, shapes, tp: int, rank: int) -> Parameter:
    columns = g.heads // tp * g.head_dim
    return Parameter((g.hidden, columns), (Piece(name, 1, 0, columns, rank * columns),))


def _intermediate_slice(g: Geometry, tp: int, rank: int) -> tuple[int, int]:
    """(padded size per rank, real rows among them): a CPU server pads to multiples of 32 R."""
    size = _round_up(g.intermediate, 32 * tp) // tp
    return size, _overlap(g.intermediate, rank * size, size)


def _gate_up(g: Geometry, name: str, shapes, tp: int, rank: int) -> Parameter:
    size, real = _intermediate_slice(g, tp, rank)
    prefix = name.rsplit(".", 2)[0]
    parts = ((f"{prefix}.gate_proj.weight", 0), (f"{prefix}.up_proj.weight", size))
    pieces = tuple(Piece(source, 0, at, real, rank * size) for source, at in parts if real)
    return Parameter((2 * size, g.hidden), pieces)


def _down(g: Geometry, name: str, shapes, tp: int, rank: int) -> Parameter:
    size, real = _intermediate_slice(g, tp, rank)
    pieces = (Piece(name, 1, 0, real, rank * size),) if real else ()
    return Parameter((g.hidden, size), pieces)
