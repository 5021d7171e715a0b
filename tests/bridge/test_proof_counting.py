"""The symbolic proof agrees with counting, on random models and layouts, whole and broken."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge import regions, registry, sharding, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight
from megatron_bridge.proof import prove
from megatron_bridge.sharding import Holding, Placement
from tests.bridge.brute_force import BruteForce, tiny_config


def _shifted(layer: int, which: int):
    """Breakages of pure functions that may or may not matter at a layout; None: whole."""

    def holdings(weight: Weight, tp: int, rank: int) -> list[Holding]:
        found = _HOLDINGS(weight, tp, rank)
        box = list(found[-1].box)
        axes = [axis for axis, (first, _) in enumerate(box) if first]
        if weight.layer == layer and rank == tp - 1 and axes:
            axis = axes[which % len(axes)]
            box[axis] = (box[axis][0] - 1, box[axis][1] - 1)
        return [*found[:-1], Holding(found[-1].rows, tuple(box))]

    return sharding, "holdings", holdings


def _misplaced(layer: int, which: int):
    """One kind of weight takes the first part on every rank."""

    def place(self: Placement, weight: Weight, rank: int) -> tuple[int, int] | None:
        found = _PLACE(self, weight, rank)
        mine = weight.layer == layer and len(weight.row.megatron) % 3 == which % 3
        return (found[0], 0) if found and mine else found

    return Placement, "place", place


def _unplaced(layer: int, which: int):
    """One rank lacks a layer's weights."""

    def place(self: Placement, weight: Weight, rank: int) -> tuple[int, int] | None:
        absent = weight.layer == layer and rank == which % self.layout.world
        return None if absent else _PLACE(self, weight, rank)

    return Placement, "place", place


def _inverse(layer: int, which: int):
    """The inverse is one further along an axis, after that axis's first place."""

    def to_megatron(self: Weight, index: int, box: regions.Box) -> regions.Box:
        found = list(_INVERSE(self, index, box))
        axis = which % len(found)
        if self.layer == layer and box[-1][0] > 0:
            found[axis] = (found[axis][0] - 1, found[axis][1] - 1)
        return tuple(found)

    return Weight, "to_megatron", to_megatron


def _one_name(layer: int, which: int):
    """The experts of a rank have one number in one layer."""

    def local_expert(self: Placement, weight: Weight) -> int | None:
        return 0 if weight.layer == layer and weight.expert is not None else _LOCAL(self, weight)

    return Placement, "local_expert", local_expert


def _fewer_pieces(layer: int, which: int):
    """The last part of a weight is not loaded."""

    def pieces(self: Weight, box: regions.Box):
        found = list(_PIECES(self, box))
        return iter(found[:-1] if self.layer == layer and which % 2 else found)

    return Weight, "pieces", pieces


_HOLDINGS, _PLACE, _INVERSE = sharding.holdings, Placement.place, Weight.to_megatron
_LOCAL, _PIECES = Placement.local_expert, Weight.pieces
_BREAKAGES = [_shifted, _misplaced, _unplaced, _inverse, _one_name, _fewer_pieces]


@st.composite
def _models(draw) -> tuple[dict[str, Any], ParallelLayout]:
    table = draw(st.sampled_from(registry.tables()))
    layers, pp = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    config = tiny_config(
        table,
        num_hidden_layers=layers,
        vocab_size=draw(st.integers(3, 14)),
        hidden_size=4 * draw(st.integers(1, 3)),
        tie_word_embeddings=draw(st.booleans()),
    )
    vpp = draw(st.sampled_from([1, layers // pp])) if pp > 1 and layers % pp == 0 else 1
    uneven = pp > 1 and (layers % pp or draw(st.booleans())) and vpp == 1
    first = draw(st.integers(1, layers - 1)) if uneven else None
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2))
    sizes = [(1, None)]
    if any(row.per_expert for row in table.rows):
        ways = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2, 4)]
        sizes = [(ep, etp) for ep, etp in ways if tp * dp % (ep * etp) == 0]
    ep, etp = draw(st.sampled_from(sizes))
    return config, ParallelLayout(tp, pp, dp, ep, etp, vpp, first)


def _compare(config: dict[str, Any], layout: ParallelLayout) -> bool:
    report = prove(config, layout)
    counted = BruteForce(translation.resolve(config), layout).faults
    assert report.ok == (not counted), (counted[:3], report.table())
    return report.ok


@settings(max_examples=12, deadline=None)
@given(_models().filter(lambda model: not model[1].problems(model[0])))
def test_counting_agrees_on_random_models_and_layouts(model):
    assert _compare(*model)


@settings(max_examples=25, deadline=None)
@given(
    _models().filter(lambda model: not model[1].problems(model[0])),
    st.sampled_from(_BREAKAGES),
    st.integers(0, 3),
    st.integers(0, 7),
)
def test_counting_agrees_on_broken_ones(model, breakage, layer, which):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*breakage(layer, which))
        _compare(*model)


@pytest.mark.parametrize("breakage", _BREAKAGES)
def test_each_breakage_is_one(breakage, monkeypatch):
    """Some variant of it is seen, by the proof and by counting alike."""
    table = registry.architecture({"architectures": ["Qwen3MoeForCausalLM"]})
    layout = ParallelLayout.parse("tp=2,pp=2,ep=2,etp=1")
    monkeypatch.setattr(*breakage(1, 0))
    seen = not _compare(tiny_config(table), layout)
    monkeypatch.setattr(*breakage(1, 1))
    assert not _compare(tiny_config(table), layout) or seen
