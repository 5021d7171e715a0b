"""Buckets: what is cut and put together again is the whole, in bounded pieces."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.weight_sync.streams import (
    CopiesDigest,
    copies_digest,
    cut,
    entries,
    gather,
    pack,
    ranges,
    scatter,
)
from megatron_bridge import regions
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.reshard_moves import read
from tests.tiny_models import make_model
from tests.weight_sync.shards import planned, routed, trainer_tensors


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from([2, 4]), st.data())
def test_ranges_cover_a_box_in_order_within_the_limit(sizes, itemsize, data):
    limit = data.draw(st.integers(itemsize, prod(sizes) * itemsize + 8))
    found = list(ranges(sizes, itemsize, limit))
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == prod(sizes)
    assert all((stop - start) * itemsize <= limit for start, stop in found)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_gathered_and_scattered_in_parts_is_the_whole(sizes, data):
    order = data.draw(st.permutations(range(len(sizes))))
    strided = torch.arange(prod(sizes)).view(sizes).permute(order)
    target = torch.full([size + 3 for size in sizes], -1)
    box = tuple((1, size + 1) for size in sizes)
    stops = data.draw(st.sets(st.integers(1, prod(sizes) - 1))) if prod(sizes) > 1 else set()
    edges = [0, *sorted(stops), prod(sizes)]
    for start, stop in zip(edges, edges[1:], strict=False):
        scatter(gather(strided, start, stop), target, box, start)
    inside = target[regions.slices(box)]
    assert torch.equal(inside.reshape(-1), strided.reshape(-1))
    assert int((target == -1).sum()) == target.numel() - prod(sizes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return make_model(tmp_path_factory.mktemp("streams") / "model")


LAYOUTS = [
    (ParallelLayout(tp=2, pp=3), 1),
    (ParallelLayout(tp=2, dp=2), 2),
    (ParallelLayout(pp=3, dp=2), 2),
]


@pytest.mark.parametrize(("layout", "tp"), LAYOUTS)
@pytest.mark.parametrize("limit", [40, 1000, 9984, 1 << 20])
def test_streams_of_buckets_are_the_engines_parameters(model, layout, tp, limit):
    plan = planned(model, layout, tp)
    routes, tensors = routed(plan), trainer_tensors(model, layout)
    want = [[torch.full(p.shape, 7.0) for p in rank] for rank in plan.targets]
    got = [[torch.full(p.shape, 7.0) for p in rank] for rank in plan.targets]
    for source in range(layout.world):
        for (_, rank), copies in routes.sends(source).items():
            digest = CopiesDigest()
            for number in copies:
                copy = plan.copies[number]
                values = read(tensors[source][copy.weight], copy.source)
                scatter(
                    gather(values, 0, copy.elements), want[rank][copy.parameter], copy.target, 0
                )
            for bucket in cut(plan, copies, limit):
                assert 0 < bucket.bytes <= limit
                area = torch.randint(0, 255, (bucket.bytes,), dtype=torch.uint8)
                pieces = []
                for piece in bucket.pieces:
                    copy = plan.copies[piece.copy]
                    pieces.append((piece, read(tensors[source][copy.weight], copy.source)))
                pack(pieces, area)
                for piece, values in pieces:
                    digest.add(gather(values, piece.start, piece.stop))
                for parameter, box, offset in entries(plan, bucket):
                    into = got[rank][parameter][regions.slices(box)]
                    flat = area[offset : offset + into.nbytes].view(torch.float32)
                    into.copy_(flat.view(into.shape))
            assert digest.hex() == copies_digest(plan, copies, got[rank])
    for rank in range(tp):
        for one, other in zip(want[rank], got[rank], strict=True):
            assert torch.equal(one, other)


def test_a_bucket_that_holds_no_element_is_refused(model):
    plan = planned(model, ParallelLayout(), 1)
    with pytest.raises(ValueError, match="a bucket of 7 bytes holds nothing"):
        cut(plan, range(3), 7)
