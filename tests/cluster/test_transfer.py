"""The protocols alone: pure functions of arguments, results and layout."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster import (
    DATA_PARALLEL,
    GATHER,
    MINI_BATCHES,
    ONE_TO_ALL,
    ROUND_ROBIN,
    transfer,
)
from hybridflow.cluster.transfer import transfer_of
from hybridflow.recipe.axes import Axis
from megatron_bridge.layout import ParallelLayout

layouts = st.builds(ParallelLayout, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))


def make(prompts: int, groups: int) -> Batch:
    rows = [torch.arange(index % 4) for index in range(prompts * groups)]
    fields = {"responses": Ragged.from_rows(rows, torch.int64), "ids": torch.arange(prompts)}
    axes = {"responses": Axis.TOKENS, "ids": Axis.PROMPTS}
    return Batch(fields, axes, prompts, groups)


@given(layouts, st.integers(0, 9), st.integers(1, 3))
@settings(deadline=None)
def test_merge_of_split_is_the_batch(layout: ParallelLayout, prompts: int, groups: int) -> None:
    batch = make(prompts, groups)
    pieces = DATA_PARALLEL.split((batch, 3), {"other": batch}, layout)
    assert len(pieces) == layout.world
    for rank, piece in enumerate(pieces):
        assert piece is not None
        assert piece.args[1] == 3
        assert piece is pieces[layout.coordinates(rank).dp * layout.tp], "shared within a dp rank"
    assert DATA_PARALLEL.merge([piece.args[0] for piece in pieces if piece], layout).equals(batch)
    others = [piece.kwargs["other"] for piece in pieces if piece]
    assert DATA_PARALLEL.merge(others, layout).equals(batch)


@dataclass(frozen=True)
class Loss:
    mini_batches: int


@given(layouts, st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3))
@settings(deadline=None)
def test_ranks_share_every_mini_batch(layout, parts, share, spare, groups) -> None:
    """The k-th parts of all ranks together are the k-th part of the whole."""
    batch = make(parts * layout.dp * share, groups)
    pieces = MINI_BATCHES.split((batch, Loss(parts)), {}, layout)
    by_dp = [pieces[layout.rank(dp=dp)].args[0] for dp in range(layout.dp)]
    for number, whole in enumerate(batch.split(parts)):
        mine = [part.split(parts)[number] for part in by_dp]
        assert Batch.concat(mine).equals(whole)
    if layout.dp > 1:
        uneven = make(parts * layout.dp * share + 1, groups)
        plain = DATA_PARALLEL.split((uneven,), {}, layout)[0].args[0]
        assert MINI_BATCHES.split((uneven, Loss(parts + 1)), {}, layout)[0].args[0].equals(plain)


@given(layouts)
def test_results_come_from_the_last_stage_in_dp_order(layout: ParallelLayout) -> None:
    def result(rank: int) -> Batch | None:
        at = layout.coordinates(rank)
        return make(at.dp + 1, 1) if at.pp == layout.pp - 1 and at.tp == 0 else None

    merged = DATA_PARALLEL.merge([result(rank) for rank in range(layout.world)], layout)
    assert merged.prompts == sum(range(1, layout.dp + 1))
    assert merged["ids"].tolist() == [i for dp in range(layout.dp) for i in range(dp + 1)]


def test_other_results_are_those_of_dp_rank_0() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    metrics = [{"rank": rank} for rank in range(8)]
    assert DATA_PARALLEL.merge(metrics, layout) == {"rank": 4}
    assert DATA_PARALLEL.merge([None] * 8, layout) is None
    assert DATA_PARALLEL.merge([[rank] for rank in range(8)], layout) == [4, 6]
    fields = [Ragged.from_rows([[rank]]) for rank in range(8)]
    assert DATA_PARALLEL.merge(fields, layout).values.tolist() == [4, 6]


def test_one_piece_serves_all_ranks() -> None:
    layout = ParallelLayout(dp=3)
    pieces = ONE_TO_ALL.split((1,), {"x": 2}, layout)
    assert len({id(piece) for piece in pieces}) == 1
    assert ONE_TO_ALL.merge(["a", "b", "c"], layout) == "a"
    assert GATHER.merge(["a", "b", "c"], layout) == ["a", "b", "c"]


def test_workers_take_turns() -> None:
    layout = ParallelLayout(dp=3)
    for turn in range(7):
        pieces = ROUND_ROBIN.split((turn,), {}, layout, turn)
        assert [rank for rank, piece in enumerate(pieces) if piece is not None] == [turn % 3]
    assert ROUND_ROBIN.merge([None, 0, None], layout) == 0


def test_a_method_declares_its_protocol() -> None:
    class Worker:
        @transfer(GATHER)
        def good(self) -> None: ...

        def bad(self) -> None: ...

    assert transfer_of(Worker.good) is GATHER
    with pytest.raises(ValueError, match="Worker.bad declares no transfer"):
        transfer_of(Worker.bad)
