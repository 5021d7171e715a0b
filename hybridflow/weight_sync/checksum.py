"""The digest of a server's live parameters, computed from the trainer's tensors.

Same numbers as a CPU server's `/weights_checker`: per parameter the first 8 bytes of SHA-256 over
its raw row-major bytes, in hex; per rank SHA-256 over (name + hex) by sorted name; per engine
SHA-256 over the ranks' hex digests in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from hybridflow.recipe.names import hint
from hybridflow.weight_sync.layout import hf_shapes, server_parameters
from hybridflow.weight_sync.layout.build import build
from megatron_bridge.reshard import TargetParameter

_EMBEDDING = "model.embed_tokens.weight"


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


@dataclass(eq=False)
class _Unfinished:
    """A parameter of a rank, the tensors that it is made of, and those that have not come."""

    rank: int
    parameter: TargetParameter
    sources: frozenset[str]
    missing: set[str]


class ServerDigest:
    """Accumulates the engine digest from HuggingFace tensors in any order.

    Holds only tensors that an incomplete parameter needs (q, k, v; gate, up; a layer's experts).
    """

    def __init__(
        self, config: Mapping[str, Any], tp: int = 1, ep: int = 1, device: str = "cpu"
    ) -> None:
        self._missing = set(hf_shapes(config))
        self._tied = bool(config.get("tie_word_embeddings"))
        self._waiting: dict[str, torch.Tensor] = {}
        self._digests: list[dict[str, str]] = [{} for _ in range(tp)]
        self._users: dict[str, list[_Unfinished]] = {name: [] for name in self._missing}
        for rank in range(tp):
            for parameter in server_parameters(config, tp=tp, ep=ep, rank=rank, device=device):
                self._expect(rank, parameter)

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
        finished = []
        for user in self._users[name]:
            user.missing.remove(name)
            if not user.missing:
                self._finish(user, tensor.dtype)
                finished.append(user)
        for user in finished:
            self._forget(user)

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator:
        """Pass `weights` through and take each on the way."""
        for name, tensor in weights:
            self.add(name, tensor)
            yield name, tensor

    def result(self) -> str:
        """The engine digest. ValueError when weights are missing."""
        return engine_digest(rank_digest(digests) for digests in self.parameters())

    def parameters(self) -> list[dict[str, str]]:
        """Each rank's digests by parameter. ValueError when weights are missing."""
        if self._missing:
            names = sorted(self._missing)
            raise ValueError(f"{len(names)} weights are missing, among them {names[:3]}.")
        return self._digests

    def _expect(self, rank: int, parameter: TargetParameter) -> None:
        # What is padding alone has no source; any tensor's coming tells its dtype.
        sources = frozenset(fill.source for fill in parameter.fills) or frozenset({_EMBEDDING})
        user = _Unfinished(rank, parameter, sources, set(sources))
        for source in sources:
            self._users[source].append(user)

    def _finish(self, user: _Unfinished, dtype: torch.dtype) -> None:
        tensor = build(user.parameter, self._waiting, dtype)
        self._digests[user.rank][user.parameter.name] = tensor_digest(tensor)

    def _forget(self, finished: _Unfinished) -> None:
        """Drop its tensors that no other parameter waits for."""
        for source in finished.sources:
            if not any(user.missing for user in self._users[source]):
                self._waiting.pop(source, None)


def server_checksum(
    weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    tp: int = 1,
    ep: int = 1,
) -> str:
    """The engine digest that a CPU server of `tp` ranks reports for these HuggingFace weights."""
    digest = ServerDigest(config, tp, ep)
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
