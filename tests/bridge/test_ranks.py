"""The harness itself: results in order, causes first, hangs told with their stacks."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksFailed, run_ranks


def _sum(base: int) -> tuple[int, float]:
    total = torch.tensor([float(base + dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def test_results_come_in_rank_order():
    assert run_ranks(_sum, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the real cause")
    dist.barrier()


def test_the_first_cause_is_shown_first():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_fail_on_one, 2)
    assert str(failure.value).startswith("rank 1 failed: KeyError: 'the real cause'")


def _sleep_where_it_shows() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_a_hang_ends_with_every_ranks_stack():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_sleep_where_it_shows, 2, timeout=3)
    text = str(failure.value)
    assert "rank 1 had not finished" in text
    assert "_sleep_where_it_shows" in text
    assert "rank 0 had not finished" in text


def _die() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def test_a_dead_rank_is_named():
    with pytest.raises(RanksFailed, match="rank 0 died"):
        run_ranks(_die, 2)
