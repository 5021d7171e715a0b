"""Every transform has its inverse, and commutes with tensor parallelism."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge import mappings
from megatron_bridge.registry import Kind
from megatron_bridge.sharding import Shard, bounds, cut, join

_FEW = settings(max_examples=60, deadline=None)
_small = st.integers(1, 5)


def _tensor(*shape: int) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.arange(size, dtype=torch.float32).reshape(shape)


@st.composite
def _projections(draw):
    """q, k, v of a model whose KV heads a tensor parallel size divides; as weight or bias."""
    tp, groups_per_rank = draw(_small), draw(st.integers(1, 3))
    queries, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    tail = draw(st.sampled_from([(), (7,)]))
    groups = tp * groups_per_rank
    q = _tensor(groups * queries * head_dim, *tail)
    k = 1e4 + _tensor(groups * head_dim, *tail)
    v = 2e4 + _tensor(groups * head_dim, *tail)
    return tp, head_dim, q, k, v


@_FEW
@given(_projections())
def test_qkv_returns_and_commutes_with_tensor_parallelism(case):
    tp, head_dim, q, k, v = case
    whole = mappings.to_megatron(Kind.QKV, [q, k, v], head_dim, 0)
    back = mappings.to_huggingface(Kind.QKV, whole, head_dim, [len(q), len(k), len(v)])
    assert all(torch.equal(a, b) for a, b in zip(back, (q, k, v), strict=True))
    parts = [
        mappings.merge_qkv(*(cut(x, Shard.ROWS, tp, rank) for x in (q, k, v)), head_dim)
        for rank in range(tp)
    ]
    assert torch.equal(join(parts, Shard.ROWS), whole)


def test_qkv_is_megatrons_order():
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    assert mappings.merge_qkv(q, k, v, 1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@_FEW
@given(_small, _small)
def test_gated_mlp_returns(rows, columns):
    gate, up = _tensor(rows, columns), 1e4 + _tensor(rows, columns)
    fc1 = mappings.to_megatron(Kind.GATED, [gate, up], 1, 0)
    back = mappings.to_huggingface(Kind.GATED, fc1, 1, [rows, rows])
    assert torch.equal(back[0], gate) and torch.equal(back[1], up)


@_FEW
@given(st.integers(1, 40), st.integers(1, 8))
def test_vocabulary_is_padded_only_as_far_as_needed(size, tp):
    padded = mappings.padded_vocabulary(size, tp)
    assert padded % tp == 0 and 0 <= padded - size < tp
    embedding = 1 + _tensor(size, 3)
    whole = mappings.to_megatron(Kind.VOCABULARY, [embedding], 1, padded)
    assert whole.shape == (padded, 3) and not whole[size:].any()
    (back,) = mappings.to_huggingface(Kind.VOCABULARY, whole, 1, [size])
    assert torch.equal(back, embedding)


@_FEW
@given(_small, _small, _small, st.sampled_from(list(Shard)))
def test_join_undoes_cut(tp, rows, columns, shard):
    whole = _tensor(rows * tp, columns * tp)
    parts = [cut(whole, shard, tp, rank) for rank in range(tp)]
    assert torch.equal(join(parts, shard), whole)


@_FEW
@given(_small, st.integers(1, 9))
def test_bounds_cover_everything_once(tp, part):
    ranges = [range(*bounds(tp * part, tp, rank)) for rank in range(tp)]
    assert [i for one in ranges for i in one] == list(range(tp * part))
