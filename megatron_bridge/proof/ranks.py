"""What holds of whole ranks: coordinates, names, bytes, experts, stages. Imports no torch."""

from collections.abc import Iterable, Mapping

from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight
from megatron_bridge.proof.holders import Place
from megatron_bridge.proof.problems import Problems, show


def check_coordinates(layout: ParallelLayout) -> None:
    """The layout's coordinates name each rank once, for experts and for the rest."""
    for rank in range(layout.world):
        plain, expert = layout.coordinates(rank), layout.expert_coordinates(rank)
        assert layout.rank(**plain._asdict()) == rank, (layout, rank)
        assert layout.expert_rank(**expert._asdict()) == rank, (layout, rank)
        assert plain.pp == expert.pp, (layout, rank)
        assert plain.tp < layout.tp and plain.dp < layout.dp and plain.pp < layout.pp
        assert expert.etp < layout.expert_tp and expert.ep < layout.ep
        assert expert.edp < layout.expert_dp


def check_stages(
    layout: ParallelLayout, layers: int, found: Mapping[int, Place], problems: Problems
) -> None:
    """The stages, chunk by chunk, are all layers in order, and hold what the weights say.

    Args:
        found: layer -> the pipeline rank and chunk of its weights.
    """
    at = 0
    for chunk in range(layout.vpp):
        for pp in range(layout.pp):
            held = layout.stage_layers(layers, pp, chunk)
            for layer in held:
                if layer != at:
                    what = f"is layer {layer} where layer {at} comes next"
                    problems.add(f"model.layers.{layer}", None, _ranks(layout, pp), what)
                if found.get(layer) != (pp, chunk):
                    what = f"is on pp={pp} chunk {chunk}, its weights are on {found.get(layer)}"
                    problems.add(f"model.layers.{layer}", None, _ranks(layout, pp), what)
                at = layer + 1
    if at != layers:
        what = f"is on no pipeline stage: of {layers} layers the stages hold {at}"
        problems.add(f"model.layers.{at}", None, (), what)


def _ranks(layout: ParallelLayout, pp: int) -> list[int]:
    return [rank for rank in range(layout.world) if layout.coordinates(rank).pp == pp]


class Ranks:
    """What every rank holds: bytes, names of parameters, experts of each layer."""

    def __init__(self, world: int) -> None:
        self.bytes = [0] * world
        self._names: dict[str, frozenset[int]] = {}
        # (row, layer) -> ranks -> local numbers of their experts.
        self._experts: dict[tuple[str, int | None], dict[frozenset[int], list[int]]] = {}

    def add_bytes(self, ranks: Iterable[int], count: int) -> None:
        """Each of the ranks holds ``count`` bytes more."""
        for rank in ranks:
            self.bytes[rank] += count

    def claim(self, name: str, ranks: frozenset[int]) -> frozenset[int]:
        """A parameter of this name is on these ranks; returns those that had one already."""
        before = self._names.get(name)
        self._names[name] = ranks if before is None else before | ranks
        return frozenset() if before is None else before & ranks

    def add_expert(self, weight: Weight, local: int, ranks: frozenset[int]) -> None:
        """An expert's weight is number ``local`` on these ranks."""
        held = self._experts.setdefault((weight.row.megatron, weight.layer), {})
        held.setdefault(ranks, []).append(local)

    def check_experts(self, experts: int, ep: int, problems: Problems) -> None:
        """Each rank holds the same number of a layer's experts, numbered from 0."""
        wanted = list(range(experts // ep))
        for (name, layer), held in self._experts.items():
            for ranks, numbers in held.items():
                if sorted(numbers) != wanted:
                    what = (
                        f"are the local experts {sorted(numbers)} on {show(ranks)}, which need "
                        f"{wanted}"
                    )
                    problems.add(name.replace("{layer}", str(layer)), None, ranks, what)
