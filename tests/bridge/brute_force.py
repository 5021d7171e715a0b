"""The proof's claims by counting: every element numbered, every rank's tensors loaded.

Shares no arithmetic with `megatron_bridge.proof`: loads with `read_megatron` as live models do,
compares numbers.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_bridge import mappings, regions, registry, sharding
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight
from megatron_bridge.reading import in_huggingface_order, read_megatron
from megatron_bridge.source import TensorInfo

SIZES: dict[str, Any] = {
    "hidden_size": 12,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "vocab_size": 13,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 5,
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}
_ALWAYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def tiny_config(table: registry.Architecture, **fields: Any) -> dict[str, Any]:
    """The smallest config of an architecture that exercises its rows."""
    known = {*_ALWAYS, "vocab_size", *table.required, *table.defaults, *table.harmless}
    config = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in known:
        config["num_key_value_heads"] = config["num_attention_heads"]
    return {**config, "architectures": [table.name], **fields}


class _Numbered:
    """A HuggingFace checkpoint of which each element is its own number, from 1."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.held, self.count = {}, 0
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            numbers = torch.arange(self.count + 1, self.count + size + 1)
            self.held[name] = numbers.reshape(shape)
            self.count += size

    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in self.held.items()}

    def read(self, name: str, ranges: Any) -> Tensor:
        return self.held[name][regions.slices(ranges)]


class BruteForce:
    """Loads a model of ``config`` (resolved) onto every rank of a layout.

    Attributes:
        faults: what is wrong, in words; empty where the proof must hold.
    """

    def __init__(self, config: dict[str, Any], layout: ParallelLayout) -> None:
        experts = registry.architecture(config).sizes(config).get("expert", 0)
        self._layout = layout
        self._where = sharding.Placement(layout, config["num_hidden_layers"], experts)
        self._weights = mappings.weights(config)
        self._source = _Numbered(mappings.huggingface_shapes(config))
        self.faults: list[str] = []
        try:
            self._ranks = [self._load(rank) for rank in range(layout.world)]
            self._count()
            self._export()
            self._invert()
        except (RuntimeError, IndexError) as error:  # boxes that do not fit tensors
            self.faults.append(str(error))

    def _load(self, rank: int) -> dict[int, Tensor]:
        """A rank's tensors by the index of their weight."""
        found, names = {}, []
        for index, weight in enumerate(self._weights):
            held = self._where.place(weight, rank)
            if held is not None:
                found[index] = self._tensor(weight, held[1])
                names += weight.live_names(self._where.local_expert(weight))
        if len(set(names)) != len(names):
            self.faults.append(f"rank {rank} has parameters of one name")
        return found

    def _tensor(self, weight: Weight, place: int) -> Tensor:
        parts = self._where.tensor_parallel(weight)
        tensor = torch.full(sharding.local_shape(weight, parts), -1)
        for holding in sharding.holdings(weight, parts, place):
            rows = tensor[holding.rows[0] : holding.rows[1]]
            target = rows.view(regions.lengths(holding.box))
            if (target != -1).any():
                self.faults.append(f"{weight.row.megatron} has rows that are filled twice")
            target.copy_(read_megatron(self._source, weight, holding.box))
        if (tensor == -1).any():
            self.faults.append(f"{weight.row.megatron} has elements that nothing fills")
        padding = int((tensor == 0).sum())
        if padding and "vocab" not in weight.axes.names:
            self.faults.append(f"{weight.row.megatron} has zeros of no tensor")
        return tensor

    def _count(self) -> None:
        """Each element is on one set of replicas, once on each, in the same place."""
        holders: list[set[int]] = [set() for _ in range(self._source.count + 1)]
        wanted: dict[int, set[frozenset[int]]] = {}
        for rank, tensors in enumerate(self._ranks):
            for index, tensor in tensors.items():
                replicas = self._replicas(self._weights[index], rank)
                for other in replicas:
                    if not _equal(self._ranks[other].get(index), tensor):
                        self.faults.append(f"ranks {rank} and {other} differ in {index}")
                for number in tensor[tensor > 0].tolist():
                    if rank in holders[number]:
                        self.faults.append(f"element {number} is twice on rank {rank}")
                    holders[number].add(rank)
                    wanted.setdefault(number, set()).add(replicas)
        for number, ranks in enumerate(holders[1:], 1):
            if wanted.get(number) != {frozenset(ranks)}:
                self.faults.append(f"element {number} is on the ranks {sorted(ranks)}")

    def _replicas(self, weight: Weight, rank: int) -> frozenset[int]:
        def key(one: int) -> tuple[int, ...]:
            layout, cut = self._layout, weight.row.cut is not None
            if weight.row.per_expert:
                there = layout.expert_coordinates(one)
                return (there.pp, there.ep, there.etp if cut else 0)
            return (layout.coordinates(one).pp, layout.coordinates(one).tp if cut else 0)

        mine = key(rank)
        return frozenset(one for one in range(self._layout.world) if key(one) == mine)

    def _export(self) -> None:
        """Owners' tensors, put together as an export does, are the checkpoint."""
        made = {name: torch.zeros_like(t) for name, t in self._source.held.items()}
        for index, weight in enumerate(self._weights):
            parts = self._where.tensor_parallel(weight)
            for owner in self._where.owners(weight):
                tensor = self._ranks[owner.rank].get(index)
                if tensor is None:
                    self.faults.append(f"{owner} does not hold {weight.row.megatron}")
                    continue
                for holding in sharding.holdings(weight, parts, owner.place):
                    rows = tensor[holding.rows[0] : holding.rows[1]]
                    box = rows.view(regions.lengths(holding.box))
                    for piece in weight.pieces(holding.box):
                        inside = regions.slices(regions.relative(piece.megatron, holding.box))
                        part = weight.parts[piece.part]
                        view = made[part.name][part.rows[0] : part.rows[1]].view(part.flat_sizes)
                        target = view[regions.slices(piece.huggingface)]
                        target += in_huggingface_order(box[inside], piece)
        for name, tensor in self._source.held.items():
            if not torch.equal(made[name], tensor):
                self.faults.append(f"the export of {name} differs")

    def _invert(self) -> None:
        """The inverse map finds each element where loading the whole tensor puts it."""
        for weight in self._weights:
            whole = regions.full(size for dimension in weight.sizes() for size in dimension)
            loaded = read_megatron(self._source, weight, whole)
            for index, part in enumerate(weight.parts):
                rows = self._source.held[part.name][part.rows[0] : part.rows[1]]
                view = rows.view(part.flat_sizes)
                for position in _positions(part.box):
                    box = tuple((at, at + 1) for at in position)
                    there = tuple(start for start, _ in weight.to_megatron(index, box))
                    if min(there) < 0 or loaded[there] != view[position]:
                        self.faults.append(f"{part.name} {position} is not at {there}")
                        break


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one, other)


def _positions(box: regions.Box) -> Iterator[tuple[int, ...]]:
    if not box:
        yield ()
        return
    for index in range(*box[0]):
        for rest in _positions(box[1:]):
            yield (index, *rest)
