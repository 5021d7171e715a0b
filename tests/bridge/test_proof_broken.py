"""The symbolic proof fails on deliberate breakages, and names tensor, element and ranks.

Breaking a pure function is the breakage itself here, not a stand-in for something slow.
"""

import json
from dataclasses import replace
from typing import Any

from megatron_bridge import mappings, regions, registry, sharding, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight
from megatron_bridge.proof import Problem, prove
from megatron_bridge.registry import Part, Row
from megatron_bridge.sharding import Holding, Owner, Placement
from tests.bridge.brute_force import tiny_config

MOE = "tp=2,pp=2,dp=2,ep=2,etp=1"
QWEN, QWEN_MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"


def _config(name: str, **fields: Any) -> dict[str, Any]:
    return tiny_config(registry.architecture({"architectures": [name]}), **fields)


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
    found = _named(faults, "model.layers.2.self_attn.v_proj.weight", (20, 0))
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
    stage = Placement.stage
    monkeypatch.setattr(
        Placement, "stage", lambda self, w: stage(self, w) if w.layer != 3 else (2, 0)
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
