"""Every layout gives what one rank gives: log-probabilities, loss, gradient norm, parameters."""

from typing import Any

import pytest
import torch

from megatron_bridge.layout import ParallelLayout
from tests.megatron.cases import GRPO, make_batch, merged, two_steps
from tests.ranks import run_ranks

LAYOUTS = {
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "dp2": ParallelLayout(dp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
    "tp2dp2": ParallelLayout(tp=2, dp=2),
}


def run(path: str, layout: ParallelLayout, vocab: int) -> list[dict[str, Any]]:
    return run_ranks(two_steps, layout.world, path, layout, make_batch(vocab=vocab), GRPO)


@pytest.fixture(scope="session")
def one_rank(tiny_qwen3: str) -> list[dict[str, Any]]:
    return run(tiny_qwen3, ParallelLayout(), 37)


@pytest.fixture(scope="session")
def one_rank_tied(tied_qwen3: str) -> list[dict[str, Any]]:
    return run(tied_qwen3, ParallelLayout(), 42)


def assert_same(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for key in ("before", "after"):
        given, wanted = merged(results, key), merged(expected, key)
        assert torch.equal(given.offsets, wanted.offsets)
        torch.testing.assert_close(given.values, wanted.values, rtol=1e-5, atol=1e-5)
    for result in results:
        assert result["metrics"] == results[0]["metrics"]  # the same floats on every rank
        for step, metrics in enumerate(result["metrics"]):
            assert metrics == pytest.approx(expected[0]["metrics"][step], rel=1e-5, abs=1e-7)
    for name, tensor in expected[0]["weights"].items():
        torch.testing.assert_close(results[0]["weights"][name], tensor, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layout_equals_one_rank(tiny_qwen3: str, one_rank: Any, layout: ParallelLayout):
    assert_same(run(tiny_qwen3, layout, 37), one_rank)


@pytest.mark.parametrize("name", ["tp2pp2", "dp2"])
def test_tied_embeddings_equal_one_rank(tied_qwen3: str, one_rank_tied: Any, name: str):
    assert_same(run(tied_qwen3, LAYOUTS[name], 42), one_rank_tied)
