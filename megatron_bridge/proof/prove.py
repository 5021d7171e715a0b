"""Proves a model's cut over a layout; see the package's docstring. Imports no torch."""

import math
import time
from collections.abc import Mapping
from typing import Any

from megatron_bridge import mappings, sharding, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight
from megatron_bridge.proof import report, tensors
from megatron_bridge.proof.holders import Holders, Place
from megatron_bridge.proof.homes import (
    Home,
    Replicas,
    check_owners,
    first_element,
    homes,
    one_stage,
)
from megatron_bridge.proof.local import check_home, check_padding
from megatron_bridge.proof.problems import Problems, show
from megatron_bridge.proof.ranks import Ranks, check_coordinates, check_stages
from megatron_bridge.proof.report import Report
from megatron_bridge.registry import HfConfig, architecture, tied

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MOST_RANKS = 100_000
"""Each is looked at; beyond this it would take hours."""
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


def prove(
    hf_config: dict[str, Any],
    layout: ParallelLayout,
    *,
    dtype: str = "bfloat16",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    limit: int = 100,
) -> Report:
    """Prove that each element of each HuggingFace tensor has one home over the layout's ranks.

    Args:
        hf_config: config.json of the model.
        layout: the parallel sizes.
        dtype: of the parameters, for the bytes; buffers that stay in float32 count as such.
        shapes: the checkpoint's tensors with their shapes, from a source other than the tables;
            None: those that the tables list.
        limit: faults to describe; the rest is counted.

    Raises:
        ValueError: when the model is not supported, cannot be cut so, for an unknown dtype or for
            more than `MOST_RANKS`.
    """
    if layout.world > MOST_RANKS:
        raise ValueError(f"{layout} has {layout.world:,} ranks; at most {MOST_RANKS:,} are proven")
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"'{dtype}' is no dtype here; choose from {', '.join(_ITEM_BYTES)}")
    config = translation.resolve(hf_config)
    found = layout.problems(config)
    if found:
        raise ValueError("the model cannot be cut so:\n" + "\n".join(f"- {one}" for one in found))
    return _Proof(config, layout, dtype, limit).run(shapes)


class _Proof:
    """The state of one proof: what the ranks hold so far."""

    def __init__(self, config: HfConfig, layout: ParallelLayout, dtype: str, limit: int) -> None:
        self._start = time.perf_counter()
        self._config = config
        self._layout = layout
        self._dtype = dtype
        self._table = architecture(config)
        self._sizes = self._table.sizes(config)
        self._layers = config["num_hidden_layers"]
        self._problems = Problems(limit)
        self._holders = Holders(layout, self._layers, self._sizes.get("expert", 0))
        self._replicas = Replicas(layout)
        self._tensors = tensors.Tensors()
        self._ranks = Ranks(layout.world)
        # Pipeline rank and chunk of each layer, as the weights of it say.
        self._stages: dict[int, Place] = {}
        self._dtypes: dict[str, str] = {}

    def run(self, shapes: Mapping[str, tuple[int, ...]] | None) -> Report:
        check_coordinates(self._layout)
        for weight in mappings.weights(self._config):
            self._check(weight)
        self._ranks.check_experts(self._sizes.get("expert", 0), self._layout.ep, self._problems)
        check_stages(self._layout, self._layers, self._stages, self._problems)
        listed = tensors.expected(self._config, self._table)
        self._tensors.check(listed if shapes is None else shapes, self._problems)
        return self._report(listed if shapes is None else shapes)

    def _check(self, weight: Weight) -> None:
        holders = self._holders.of(weight)
        parts = self._holders.placement.tensor_parallel(weight)
        self._check_stage(weight, holders)
        found = homes(weight, holders, parts, self._replicas, self._problems)
        for home in found:
            for source in check_home(weight, home, parts, self._problems):
                self._tensors.add(weight.parts[source.part], source.box, home.ranks)
        check_padding(weight, found, parts, self._problems)
        check_owners(weight, holders, found, self._holders.placement, self._problems)
        self._hold(weight, holders, found, parts)

    def _check_stage(self, weight: Weight, holders: dict[int, Place]) -> None:
        """All of a layer's weights are on one stage."""
        stages = one_stage(weight, holders, self._layout)
        if weight.layer is not None and stages:
            stages.add(self._stages.setdefault(weight.layer, min(stages)))
        if len(stages) > 1:
            where = " and ".join(f"pp={pp} chunk {chunk}" for pp, chunk in sorted(stages))
            what = f"of layer {weight.layer} is not on the one stage of that layer: {where}"
            self._problems.add(*self._first(weight), holders, what)

    def _first(self, weight: Weight) -> tuple[str, tuple[int, ...] | None]:
        return first_element(weight, sharding.holdings(weight, 1, 0))

    def _hold(
        self, weight: Weight, holders: dict[int, Place], found: list[Home], parts: int
    ) -> None:
        """Note names and bytes of what each rank holds."""
        ranks = frozenset(holders)
        local = self._holders.placement.local_expert(weight)
        dtype = weight.row.dtype or self._dtype
        self._dtypes |= {part.name: dtype for part in weight.parts}
        count = math.prod(sharding.local_shape(weight, parts)) * _ITEM_BYTES[dtype]
        self._ranks.add_bytes(ranks, count)
        for name in weight.live_names(local):
            self._claim(name, ranks, weight)
        if weight.row.per_expert and local is not None:
            for home in found:
                self._ranks.add_expert(weight, local, home.ranks)
        if weight.row.megatron == _EMBEDDING and tied(self._config) and self._layout.pp > 1:
            last = [rank for rank in range(self._layout.world) if self._is_last(rank)]
            self._ranks.add_bytes(last, count)
            self._claim(_OUTPUT, frozenset(last), weight)

    def _is_last(self, rank: int) -> bool:
        return self._layout.coordinates(rank).pp == self._layout.pp - 1

    def _claim(self, name: str, ranks: frozenset[int], weight: Weight) -> None:
        both = self._ranks.claim(name, ranks)
        if both:
            what = f"has the name '{name}' that another parameter has on {show(both)}"
            self._problems.add(*self._first(weight), both, what)

    def _report(self, shapes: Mapping[str, tuple[int, ...]]) -> Report:
        elements = {name: math.prod(shape) for name, shape in shapes.items()}
        layers = [0] * self._layout.pp
        for pp, _ in self._stages.values():
            layers[pp] += 1
        stage_of = [self._layout.coordinates(rank).pp for rank in range(self._layout.world)]
        return Report(
            architecture=self._table.name,
            layout=str(self._layout),
            dtype=self._dtype,
            problems=tuple(self._problems.listed),
            problem_count=self._problems.count,
            tensors=len(shapes),
            elements=sum(elements.values()),
            bytes=sum(n * self._item_bytes(name) for name, n in elements.items()),
            rank_bytes=tuple(self._ranks.bytes),
            stages=report.stages(self._ranks.bytes, layers, stage_of),
            seconds=time.perf_counter() - self._start,
        )

    def _item_bytes(self, name: str) -> int:
        return _ITEM_BYTES[self._dtypes.get(name, self._dtype)]
