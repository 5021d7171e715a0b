"""The digest of a server's live parameters, computed from the trainer's tensors.

Same numbers as a CPU server's `/weights_checker`: per parameter the first 8 bytes of SHA-256 over
its raw row-major bytes, in hex; per rank SHA-256 over (name + hex) by sorted name; per engine
SHA-256 over the ranks' hex digests in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from hybridflow.recipe.names import hint
from hybridflow.weight_sync.layout import Parameter, hf_shapes, server_layout


def tensor_digest(tensor: torch.Tensor) -> str:
    """16 hex digits over the raw bytes of `tensor`, row-major."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]


def rank_digest(digests: Mapping[str, str]) -> str:
    """One rank's digest from its parameters' digests by name."""
    total = hashlib.sha256()
    for name in sorted(digests):
        total.update(name.encode())
        total.update(digests[name].encode())
    return total.hexdigest()


def engine_digest(ranks: Iterable[str]) -> str:
    """The engine's digest from its ranks' digests in rank order."""
    return hashlib.sha256("".join(ranks).encode()).hexdigest()


class ServerDigest:
    """Accumulates the engine digest from HuggingFace tensors in any order.

    Holds only tensors whose fused parameter is not complete yet (q, k, v; gate, up).
    """

    def __init__(self, config: Mapping[str, Any], tp: int = 1) -> None:
        self._layouts = [server_layout(config, tp, rank) for rank in range(tp)]
        self._missing = set(hf_shapes(config))
        self._tied = bool(config.get("tie_word_embeddings"))
        self._targets = _targets_by_source(self._layouts)
        self._waiting: dict[str, torch.Tensor] = {}
        self._digests: list[dict[str, str]] = [{} for _ in range(tp)]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one full HuggingFace tensor. ValueError for an unknown or repeated name."""
        if name == "lm_head.weight" and self._tied:
            return
        if name not in self._missing:
            raise ValueError(
                f"weight {name!r} is not expected (unknown, or given twice); "
                f"{hint(name, self._missing)}"
            )
        self._missing.remove(name)
        self._waiting[name] = tensor
        for target in self._targets[name]:
            self._finish(target)
        self._forget(name)

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator:
        """Pass `weights` through and take each on the way."""
        for name, tensor in weights:
            self.add(name, tensor)
            yield name, tensor

    def result(self) -> str:
        """The engine digest. ValueError when weights are missing."""
        if self._missing:
            names = sorted(self._missing)
            raise ValueError(f"{len(names)} weights are missing, among them {names[:3]}.")
        return engine_digest(rank_digest(digests) for digests in self._digests)

    def _finish(self, target: str) -> None:
        """Hash `target` on every rank when all its sources have come."""
        sources = {piece.source for layout in self._layouts for piece in layout[target].pieces}
        if not sources <= self._waiting.keys():
            return
        dtype = self._waiting[next(iter(sources))].dtype
        for layout, digests in zip(self._layouts, self._digests, strict=True):
            digests[target] = tensor_digest(layout[target].build(self._waiting, dtype))

    def _forget(self, name: str) -> None:
        """Drop the sources of every finished parameter that `name` belongs to."""
        for target in self._targets[name]:
            if target in self._digests[0]:
                for layout in self._layouts:
                    for piece in layout[target].pieces:
                        self._waiting.pop(piece.source, None)


def server_checksum(
    weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    tp: int = 1,
) -> str:
    """The engine digest that a CPU server of `tp` ranks reports for these HuggingFace weights."""
    digest = ServerDigest(config, tp)
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    for name, tensor in cast(Iterable[tuple[str, torch.Tensor]], pairs):
        digest.add(name, tensor)
    return digest.result()


def parameters_checksum(ranks: Iterable[Mapping[str, torch.Tensor]]) -> str:
    """The engine digest of live parameters, one mapping (name to tensor) per rank."""
    return engine_digest(
        rank_digest({name: tensor_digest(tensor) for name, tensor in rank.items()})
        for rank in ranks
    )


def _targets_by_source(layouts: list[dict[str, Parameter]]) -> dict[str, list[str]]:
    targets: dict[str, list[str]] = {}
    for layout in layouts:
        for target, parameter in layout.items():
            for piece in parameter.pieces:
                known = targets.setdefault(piece.source, [])
                if target not in known:
                    known.append(target)
    return targets
