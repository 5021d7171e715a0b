"""The symbolic proof: it holds for every table, sees every breakage, and agrees with counting."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge import mappings, regions, registry, sharding, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight
from megatron_bridge.proof import prove
from megatron_bridge.proof.problems import Problem
from megatron_bridge.registry import Part, Row
from megatron_bridge.sharding import Holding, Owner, Placement
from tests.bridge.brute_force import BruteForce, tiny_config

LAYOUTS = [
    "tp=1",
    "dp=3",
    "tp=2",
    "tp=4",
    "tp=2,pp=2,dp=2",
    "pp=4",
    "pp=2,vpp=2",
    "tp=2,pp=3,first_stage_layers=1,last_stage_layers=1",
    "pp=2,first_stage_layers=1",
    "tp=2,pp=2,dp=2,ep=2,etp=1",
    "tp=2,dp=2,ep=2",
    "tp=1,dp=4,ep=2,etp=2",
    "tp=4,pp=2,dp=2,ep=4,etp=1,vpp=2",
]
MOE = "tp=2,pp=2,dp=2,ep=2,etp=1"
QWEN, QWEN_MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"


def _config(name: str, **fields: Any) -> dict[str, Any]:
    return tiny_config(registry.architecture({"architectures": [name]}), **fields)


def _possible(config: dict[str, Any]) -> list[ParallelLayout]:
    found = [ParallelLayout.parse(text) for text in LAYOUTS]
    return [layout for layout in found if not layout.problems(config)]


@pytest.mark.parametrize("name", registry.supported())
@pytest.mark.parametrize("tied", [False, True])
def test_every_table_is_proven_at_every_layout(name, tied):
    config = _config(name, tie_word_embeddings=tied)
    layouts = _possible(config)
    assert len(layouts) >= 6
    for layout in layouts:
        report = prove(config, layout, dtype="float32")
        assert report.ok, report.table()
        assert report.ranks == layout.world
        assert report.bytes == 4 * report.elements
        shapes = mappings.huggingface_shapes(translation.resolve(config))
        assert report.tensors == len(shapes)


def test_the_bytes_are_those_of_the_parameters():
    """Without tensor parallelism stages hold the model once, a tied embedding twice."""
    config = _config(QWEN, tie_word_embeddings=True)
    one = prove(config, ParallelLayout())
    two = prove(config, ParallelLayout(pp=2))
    embedding = config["vocab_size"] * config["hidden_size"] * 2
    assert one.rank_bytes == (one.bytes,)
    assert sum(two.rank_bytes) == one.bytes + embedding
    # The vocabulary of 13 is padded to 14 for two ranks; norms are on both.
    cut = prove({**config, "tie_word_embeddings": False}, ParallelLayout(tp=2))
    norms = 2 * (4 * (2 * config["hidden_size"] + 2 * config["head_dim"]) + config["hidden_size"])
    padding = 2 * config["hidden_size"] * 2
    assert sum(cut.rank_bytes) == cut.bytes + norms + padding


def test_buffers_in_float32_count_as_such():
    config = _config("DeepseekV3ForCausalLM")
    bias = 3 * config["n_routed_experts"]  # one per layer with experts
    report = prove(config, ParallelLayout())
    assert report.bytes == 2 * report.elements + 2 * bias
    assert report.rank_bytes == (report.bytes,)


def test_the_report_is_json_and_text():
    config = _config(QWEN_MOE)
    report = prove(config, ParallelLayout.parse(MOE))
    content = json.loads(json.dumps(report.to_json()))
    assert content["ok"] and content["problems"] == [] and len(content["rank_bytes"]) == 8
    assert content["least"] <= content["mean"] <= content["most"]
    assert [stage["layers"] for stage in content["stages"]] == [2, 2]
    assert "proven" in report.table() and QWEN_MOE in report.table()


def test_what_cannot_be_proven_is_refused():
    with pytest.raises(ValueError, match="cannot be cut"):
        prove(_config(QWEN), ParallelLayout(tp=3))
    with pytest.raises(ValueError, match="choose from float64"):
        prove(_config(QWEN), ParallelLayout(), dtype="int8")
    with pytest.raises(ValueError, match="not supported"):
        prove({**_config(QWEN), "attention_bias": True, "hidden_act": "relu"}, ParallelLayout())


def test_proving_imports_no_torch():
    code = "import sys, megatron_bridge.proof; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def _faults(config: dict[str, Any], layout: str, **options: Any) -> list[Problem]:
    report = prove(config, ParallelLayout.parse(layout), **options)
    assert not report.ok and "NOT proven" in report.table()
    json.dumps(report.to_json())
    return list(report.problems)


def _named(faults: list[Problem], tensor: str, element: tuple[int, ...]) -> Problem:
    """The fault of this element; every fault names ranks and texts of its own."""
    found = [one for one in faults if (one.tensor, one.element) == (tensor, element)]
    assert found, "\n".join(map(str, faults))
    return found[0]


def _change_box(monkeypatch, row: str, place: int, change) -> None:
    """Make tensor parallel rank ``place`` hold other rows of a weight of layer 1."""
    real = sharding.holdings

    def broken(weight: Weight, tp: int, rank: int) -> list[Holding]:
        found = real(weight, tp, rank)
        if weight.layer == 1 and weight.row.megatron.endswith(row) and rank == place:
            axis = weight.axes.names.index("ffn")
            box = list(found[0].box)
            box[axis] = change(*box[axis])
            return [Holding(found[0].rows, tuple(box))]
        return found

    monkeypatch.setattr(sharding, "holdings", broken)


def test_a_dropped_row_is_named(monkeypatch):
    _change_box(monkeypatch, "mlp.linear_fc1.weight", 1, lambda a, b: (a, b - 1))
    faults = _faults(_config(QWEN), "tp=2,dp=2")
    for tensor in ("gate_proj", "up_proj"):
        found = _named(faults, f"model.layers.1.mlp.{tensor}.weight", (7, 0))
        assert "no rank" in found.what
    # The ranks whose tensor is not filled.
    assert any(one.ranks == (1, 3) for one in faults)
    assert all("layers.1.mlp" in one.tensor for one in faults)


def test_a_doubled_row_is_named(monkeypatch):
    _change_box(monkeypatch, "mlp.linear_fc2.weight", 1, lambda a, b: (a - 1, b))
    faults = _faults(_config(QWEN), "tp=2,dp=2")
    found = _named(faults, "model.layers.1.mlp.down_proj.weight", (0, 3))
    assert "two homes" in found.what and found.ranks == (0, 1, 2, 3)


def test_a_wrong_cut_is_named(monkeypatch):
    """Both ranks hold the first half."""
    _change_box(monkeypatch, "mlp.linear_fc2.weight", 1, lambda a, b: (0, b - a))
    faults = _faults(_config(QWEN), "tp=2")
    name = "model.layers.1.mlp.down_proj.weight"
    assert _named(faults, name, (0, 0)).ranks == (0, 1)
    assert "no rank" in _named(faults, name, (0, 4)).what


def _with_rows(monkeypatch, name: str, change) -> None:
    """Another table for one architecture."""
    known = dict(registry._modules())
    module, table = known[name]
    known[name] = (module, replace(table, rows=tuple(change(table.rows))))
    monkeypatch.setattr(registry, "_modules", lambda: known)


def test_two_parts_of_one_name_that_overlap_are_named(monkeypatch):
    """The same tensor by other axes, in a second row of the table."""
    second = Row(
        "decoder.layers.{layer}.self_attention.extra.weight",
        "head head_dim, hidden",
        (Part("model.layers.{layer}.self_attn.q_proj.weight", "head head_dim, hidden"),),
        cut="head",
    )
    _with_rows(monkeypatch, QWEN, lambda rows: (*rows[:2], second, *rows[2:]))
    faults = _faults(_config(QWEN), "tp=2,pp=2")
    for layer, ranks in ((0, (0,)), (3, (2,))):
        found = _named(faults, f"model.layers.{layer}.self_attn.q_proj.weight", (0, 0))
        assert "is twice" in found.what and found.ranks == ranks


def test_a_table_without_a_row_is_seen_beside_the_checkpoints_shapes(monkeypatch):
    config = _config(QWEN)
    shapes = mappings.huggingface_shapes(translation.resolve(config))
    assert prove(config, ParallelLayout(), shapes=shapes).ok
    _with_rows(monkeypatch, QWEN, lambda rows: [r for r in rows if "k_layernorm" not in r.megatron])
    faults = _faults(config, "tp=2", shapes=shapes)
    assert len(faults) == 4
    assert "no rank" in _named(faults, "model.layers.2.self_attn.k_norm.weight", (0,)).what


def test_an_inverse_that_disagrees_is_named(monkeypatch):
    """Exporting takes the last head's value from the key beside it."""
    real = Weight.to_megatron

    def broken(self: Weight, index: int, box: regions.Box) -> regions.Box:
        found = real(self, index, box)
        if self.layer == 2 and index == 2 and box[0] == (1, 2):
            found = (found[0], (found[1][0] - 1, found[1][1] - 1), *found[2:])
        return found

    monkeypatch.setattr(Weight, "to_megatron", broken)
    faults = _faults(_config(QWEN), "tp=2,dp=2")
    found = _named(faults, "model.layers.2.self_attn.v_proj.weight", (6, 0))
    assert len(faults) == 1 and found.ranks == (1, 3) and "exported from" in found.what


def test_a_stage_that_drops_a_layer_is_named(monkeypatch):
    real = ParallelLayout.stage_layers

    def short(self: ParallelLayout, layers: int, pp: int, chunk: int = 0) -> range:
        found = real(self, layers, pp, chunk)
        return found[:-1] if pp == 1 else found

    monkeypatch.setattr(ParallelLayout, "stage_layers", short)
    faults = _faults(_config(QWEN), "pp=2")
    assert [one.tensor for one in faults] == ["model.layers.3"]
    monkeypatch.undo()
    stages = Placement.stages
    monkeypatch.setattr(
        Placement, "stages", lambda self, w: stages(self, w) if w.layer != 3 else [(2, 0)]
    )
    faults = _faults(_config(QWEN), "pp=2")
    assert "no rank" in _named(faults, "model.layers.3.mlp.up_proj.weight", (0, 0)).what


def _place(monkeypatch, broken) -> None:
    """``broken(weight, rank, found, layout)`` instead of what `place` finds."""
    real = Placement.place

    def place(self: Placement, weight: Weight, rank: int) -> tuple[int, int] | None:
        return broken(weight, rank, real(self, weight, rank), self.layout)

    monkeypatch.setattr(Placement, "place", place)


def test_an_expert_held_twice_is_named(monkeypatch):
    def broken(weight, rank, found, layout):
        there = layout.expert_coordinates(rank)
        twice = weight.layer == 3 and weight.expert == 1 and "fc2" in weight.row.megatron
        return (0, there.etp) if twice and there.pp == 1 and there.ep == 1 else found

    _place(monkeypatch, broken)
    faults = _faults(_config(QWEN_MOE), MOE)
    found = _named(faults, "model.layers.3.mlp.experts.1.down_proj.weight", (0, 0))
    assert "two homes" in found.what and found.ranks == (4, 5, 6, 7)
    # And those ranks have three experts, two of them of one name.
    assert any("local experts [0, 1, 1]" in one.what for one in faults)
    assert any("has the name" in one.what for one in faults)


def test_an_expert_on_another_stage_too_is_named(monkeypatch):
    def broken(weight, rank, found, _layout):
        twice = weight.layer == 3 and weight.expert == 2 and "fc1" in weight.row.megatron
        return (0, 0) if twice and rank in (1, 3) else found

    _place(monkeypatch, broken)
    faults = _faults(_config(QWEN_MOE), MOE)
    found = _named(faults, "model.layers.3.mlp.experts.2.up_proj.weight", (0, 0))
    assert {1, 3} < set(found.ranks)


def test_a_replica_without_a_weight_is_named(monkeypatch):
    def broken(weight, rank, found, _layout):
        return None if rank == 3 and weight.layer == 0 and "fc2" in weight.row.megatron else found

    _place(monkeypatch, broken)
    faults = _faults(_config(QWEN), "tp=2,dp=2")
    found = _named(faults, "model.layers.0.mlp.down_proj.weight", (0, 4))
    assert len(faults) == 1 and found.ranks == (1, 3) and "not on rank 3" in found.what


def test_a_wrong_owner_is_named(monkeypatch):
    real = Placement.owners

    def swapped(self: Placement, weight: Weight) -> list[Owner]:
        found = real(self, weight)
        return [found[0]] * len(found) if weight.row.megatron.startswith("output") else found

    monkeypatch.setattr(Placement, "owners", swapped)
    faults = _faults(_config(QWEN), "tp=2")
    assert {one.tensor for one in faults} == {"lm_head.weight"}
    assert {one.element for one in faults} == {(0, 0), (7, 0)}


def test_all_faults_are_counted_and_the_first_described(monkeypatch):
    _place(monkeypatch, lambda weight, rank, found, layout: None if rank == 1 else found)
    report = prove(_config(QWEN), ParallelLayout(tp=2), limit=5)
    assert len(report.problems) == 5 < report.problem_count
    assert f"and {report.problem_count - 5} more" in report.table()


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


DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}


def test_deepseek_v3_in_small():
    """Its published widths, three dense layers and two with 16 experts, on 256 ranks."""
    config = {**DEEPSEEK_V3, "num_hidden_layers": 5, "n_routed_experts": 16}
    layout = ParallelLayout.parse("tp=8,pp=2,ep=8,etp=2,dp=16,first_stage_layers=3")
    report = prove(config, layout)
    assert report.ok, report.table()
    assert [stage.layers for stage in report.stages] == [3, 2]


@pytest.mark.slow
def test_deepseek_v3_on_2048_ranks():
    layout = "tp=8,pp=16,ep=64,etp=1,dp=16,first_stage_layers=3,last_stage_layers=2"
    report = prove(DEEPSEEK_V3, ParallelLayout.parse(layout))
    assert report.ok, report.table()
    assert report.ranks == 2048
    assert report.elements == 671_026_419_200
    assert report.bytes == 2 * report.elements + 2 * 58 * 256  # the routers' biases
