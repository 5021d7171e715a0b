"""Who takes which devices: pools on hosts, and rollout servers within a pool."""

import pytest

from hybridflow.recipe.placement import engine_slots, packed
from megatron_bridge.layout import ParallelLayout


def test_pools_take_the_emptiest_host_and_fill_it():
    assert packed([3, 2], hosts=1, devices=5) == [
        ((0, 0), (0, 1), (0, 2)),
        ((0, 3), (0, 4)),
    ]
    first, second = packed([6, 4], hosts=2, devices=8)
    assert {host for host, _ in first} == {0}
    assert second == ((1, 0), (1, 1), (1, 2), (1, 3))


def test_the_host_with_most_of_a_pool_comes_first():
    _, second = packed([3, 6], hosts=2, devices=5)
    assert [host for host, _ in second] == [1, 1, 1, 1, 1, 0]
    assert len(packed([9], hosts=1, devices=2)[0]) == 9  # more hosts than there are


def test_servers_reuse_the_shards_of_the_trainer_whose_tp_they_divide():
    hosts = ["a"] * 4 + ["b"] * 4
    layout = ParallelLayout(tp=4, dp=2)
    assert engine_slots(hosts, 2, 4, layout) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert engine_slots(hosts, 2, 1, layout) == ((0, 2),)
    assert engine_slots(hosts, 2, 4) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert engine_slots(hosts, 4, 2, ParallelLayout(tp=2, dp=4)) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_servers_that_would_cross_nodes_take_neighbours():
    hosts = ["a"] * 4 + ["b"] * 4
    assert engine_slots(hosts, 4, 2, ParallelLayout(tp=8)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert engine_slots(["a"] * 3 + ["b"] * 2, 2, 2) == ((0, 1), (3, 4))


def test_servers_that_fit_on_no_node_are_refused():
    with pytest.raises(ValueError, match=r"2 rollout .* tp=2 .* 4 devices are 3 \+ 1 of 2 node"):
        engine_slots(["a"] * 3 + ["b"], 2, 2)
