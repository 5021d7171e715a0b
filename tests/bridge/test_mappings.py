"""Interval arithmetic, the tables' transforms and cuts: laws, against an independent reference."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge import regions
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight
from megatron_bridge.reading import read_megatron
from megatron_bridge.registry import Part, Row
from megatron_bridge.row_shape import RowShape, padded_vocabulary
from megatron_bridge.sharding import holdings, local_shape
from megatron_bridge.source import TensorInfo

_FEW = settings(max_examples=60, deadline=None)
_small = st.integers(1, 4)


class Memory:
    """Tensors in memory as a source."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.held = held

    def tensors(self):
        return {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in self.held.items()}

    def read(self, name, ranges):
        return self.held[name][regions.slices(ranges)]


def _numbered(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors whose elements are all different."""
    result, start = [], 0
    for shape in shapes:
        count = torch.Size(shape).numel()
        result.append(torch.arange(start, start + count, dtype=torch.float64).reshape(shape))
        start += count
    return result


def _weight(row: Row, **sizes: int) -> Weight:
    return Weight(row, None, None, RowShape(row, sizes))


def _loaded(weight: Weight, held: dict[str, torch.Tensor], tp: int, rank: int) -> torch.Tensor:
    """One rank's tensor, as loading fills it."""
    tensor = torch.full(local_shape(weight, tp), -1.0, dtype=torch.float64)
    for holding in holdings(weight, tp, rank):
        rows = tensor[holding.rows[0] : holding.rows[1]]
        rows.view(regions.lengths(holding.box)).copy_(
            read_megatron(Memory(held), weight, holding.box)
        )
    return tensor


@st.composite
def _ranges(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    total = torch.Size(sizes).numel()
    start = draw(st.integers(0, total))
    return sizes, (start, draw(st.integers(start, total)))


@_FEW
@given(_ranges())
def test_a_range_is_its_boxes_in_order(case):
    sizes, (start, stop) = case
    numbers = torch.arange(torch.Size(sizes).numel()).view(sizes)
    boxes = list(regions.of_range(sizes, (start, stop)))
    found = [n for box in boxes for n in numbers[regions.slices(box)].flatten().tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * len(sizes)
    for box in boxes:
        first = numbers[regions.slices(box)].min().item()
        assert regions.flat(sizes, box) == (first, first + regions.volume(box))


@st.composite
def _boxes(draw, sizes):
    box = []
    for size in sizes:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    return tuple(box)


@_FEW
@given(st.data())
def test_subtraction_leaves_the_rest_once(data):
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    one, other = data.draw(_boxes(sizes)), data.draw(_boxes(sizes))
    count = torch.zeros(sizes)
    for box in regions.subtract(one, other):
        count[regions.slices(box)] += 1
    wanted = torch.zeros(sizes)
    wanted[regions.slices(one)] = 1
    wanted[regions.slices(other)] = 0
    assert torch.equal(count, wanted)


def test_holes_and_clashes_are_named():
    whole = ((0, 4), (0, 3))
    parts = [((0, 4), (0, 1)), ((0, 2), (1, 3)), ((2, 4), (2, 3))]
    assert regions.uncovered(whole, parts) == (2, 1)
    assert regions.uncovered(whole, [*parts, ((2, 4), (1, 2))]) is None
    assert regions.clash(parts) is None
    assert regions.clash([*parts, ((1, 3), (2, 3))]) == (1, 2)


QKV = Row(
    "qkv",
    "group + head_dim, hidden",
    (
        Part("q", "group query head_dim, hidden"),
        Part("k", "group head_dim, hidden"),
        Part("v", "group head_dim, hidden"),
    ),
    cut="group",
)


def _interleaved(q, k, v, groups, head_dim):
    """Megatron's qkv, from its definition: each group's queries, its key, its value."""
    rows = []
    for group in range(groups):
        for x in (q, k, v):
            count = x.shape[0] // groups
            rows.append(x[group * count : (group + 1) * count])
    return torch.cat(rows)


@_FEW
@given(st.integers(1, 3), _small, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_qkv_is_interleaved_by_group_and_cut_between_groups(
    tp, per_rank, queries, head_dim, hidden
):
    groups = tp * per_rank
    q, k, v = _numbered(
        (groups * queries * head_dim, hidden),
        (groups * head_dim, hidden),
        (groups * head_dim, hidden),
    )
    weight = _weight(QKV, group=groups, query=queries, head_dim=head_dim, hidden=hidden)
    parts = [_loaded(weight, {"q": q, "k": k, "v": v}, tp, rank) for rank in range(tp)]
    assert torch.equal(torch.cat(parts), _interleaved(q, k, v, groups, head_dim))


@_FEW
@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 4), st.integers(1, 3))
def test_ranks_that_share_a_key_value_head_hold_equal_runs_of_rows(groups, ranks, queries, hidden):
    tp, head_dim = groups * ranks, 12
    q, k, v = _numbered(
        (groups * queries * head_dim, hidden),
        (groups * head_dim, hidden),
        (groups * head_dim, hidden),
    )
    weight = _weight(QKV, group=groups, query=queries, head_dim=head_dim, hidden=hidden)
    parts = [_loaded(weight, {"q": q, "k": k, "v": v}, tp, rank) for rank in range(tp)]
    assert {part.shape for part in parts} == {local_shape(weight, tp)}
    assert torch.equal(torch.cat(parts), _interleaved(q, k, v, groups, head_dim))


GATED = (Part("gate", "ffn, hidden"), Part("up", "ffn, hidden"))
FUSED = (Part("gate_up", "ffn, hidden"), Part("gate_up", "ffn, hidden"))


@_FEW
@given(st.booleans(), _small, _small, _small)
def test_each_rank_stacks_its_gate_on_its_up(fused, tp, per_rank, hidden):
    ffn = tp * per_rank
    gate, up = _numbered((ffn, hidden), (ffn, hidden))
    row = Row("fc1", "+ ffn, hidden", FUSED if fused else GATED, cut="ffn")
    held = {"gate_up": torch.cat([gate, up])} if fused else {"gate": gate, "up": up}
    weight = _weight(row, ffn=ffn, hidden=hidden)
    for rank in range(tp):
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        wanted = torch.cat([gate[mine], up[mine]])
        assert torch.equal(_loaded(weight, held, tp, rank), wanted)


@_FEW
@given(_small, _small, _small, st.integers(2, 3))
def test_an_experts_slice_is_turned_over_and_taken_apart(tp, per_rank, hidden, experts):
    ffn = tp * per_rank
    (fused,) = _numbered((experts, hidden, 2 * ffn))
    row = Row("{expert}", "pair ffn, hidden", (Part("w", "expert, hidden, ffn pair"),), cut="ffn")
    shape = RowShape(row, {"expert": experts, "hidden": hidden, "ffn": ffn, "pair": 2})
    for expert in range(experts):
        weight = Weight(row, None, expert, shape)
        for rank in range(tp):
            mine = slice(rank * per_rank, (rank + 1) * per_rank)
            gate, up = fused[expert, :, 0::2].T[mine], fused[expert, :, 1::2].T[mine]
            wanted = torch.cat([gate, up])
            assert torch.equal(_loaded(weight, {"w": fused}, tp, rank), wanted)


@_FEW
@given(st.integers(1, 20), _small, _small)
def test_the_vocabulary_is_padded_with_zeros(vocab, tp, hidden):
    row = Row("embedding", "vocab, hidden", (Part("e", "vocab, hidden"),), cut="vocab")
    (table,) = _numbered((vocab, hidden))
    weight = _weight(row, vocab=vocab, hidden=hidden)
    whole = torch.cat([_loaded(weight, {"e": table}, tp, rank) for rank in range(tp)])
    assert whole.shape[0] == padded_vocabulary(vocab, tp) < vocab + tp
    assert torch.equal(whole[:vocab], table)
    assert not whole[vocab:].any()


@_FEW
@given(st.data())
def test_a_box_returns_to_where_it_came_from(data):
    sizes = {"group": 3, "query": 2, "head_dim": 4, "hidden": 5}
    weight = _weight(QKV, **sizes)
    box = data.draw(_boxes([size for dimension in weight.sizes() for size in dimension]))
    pieces = list(weight.pieces(box))
    assert sum(regions.volume(piece.megatron) for piece in pieces) == regions.volume(box)
    for piece in pieces:
        assert weight.to_megatron(piece.part, piece.huggingface) == piece.megatron


def test_layers_are_spread_in_megatrons_order():
    layout = ParallelLayout(pp=2, vpp=2)
    chunks = [list(layout.stage_layers(8, pp, chunk)) for chunk in (0, 1) for pp in (0, 1)]
    assert chunks == [[0, 1], [2, 3], [4, 5], [6, 7]]
    uneven = ParallelLayout(pp=4, first_stage_layers=1, last_stage_layers=2)
    assert [list(uneven.stage_layers(9, pp)) for pp in range(4)] == [
        [0],
        [1, 2, 3],
        [4, 5, 6],
        [7, 8],
    ]
    for one in (layout, uneven):
        layers = 8 if one is layout else 9
        for pp in range(one.pp):
            for chunk in range(one.vpp):
                for layer in one.stage_layers(layers, pp, chunk):
                    assert one.stage_of(layers, layer) == (pp, chunk)


def test_experts_are_placed_in_megatrons_order():
    layout = ParallelLayout(tp=2, dp=2, pp=2, ep=2, etp=1)
    places = [layout.expert_coordinates(rank) for rank in range(8)]
    assert [(p.etp, p.ep, p.edp, p.pp) for p in places[:4]] == [
        (0, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
        (0, 1, 1, 0),
    ]
    for rank, p in enumerate(places):
        assert layout.expert_rank(etp=p.etp, ep=p.ep, edp=p.edp, pp=p.pp) == rank
    assert ParallelLayout.parse("tp=2, pp=2,dp=2,ep=2,etp=1") == layout
    assert str(layout) == "tp=2,pp=2,dp=2,ep=2,etp=1"
