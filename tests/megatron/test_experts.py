"""Models with experts, and with latent attention: every layout trains as one rank does."""

from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from hybridflow.algorithms.packing import pack_rows
from hybridflow.batch import Batch, Ragged
from hybridflow.megatron import shared_prompts
from megatron_bridge.layout import ParallelLayout
from tests.megatron.cases import GRPO, make_batch, make_engine, merged, my_part, two_steps
from tests.megatron.test_layouts import assert_same
from tests.megatron.test_reference import reference
from tests.ranks import RanksFailed, run_ranks

MICRO_BATCH_TOKENS = 20
LAYOUTS = {
    "ep2": ParallelLayout(dp=2, ep=2),
    "etp2": ParallelLayout(tp=2),
    "ep2-in-tp2": ParallelLayout(tp=2, ep=2, etp=1),
    "tp2ep2": ParallelLayout(tp=2, dp=2, ep=2),
    "pp2ep2": ParallelLayout(pp=2, dp=2, ep=2, first_stage_layers=1),
    "etp2-of-dp2": ParallelLayout(dp=2, etp=2),
    "replicas-of-ep2": ParallelLayout(tp=2, dp=2, ep=2, etp=1),
}
MODELS = ("tiny_qwen3_moe", "tiny_deepseek_v3")


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Its first half fills more packs than its second, so data-parallel ranks differ in number."""
    made = make_batch(seed=3)
    first, second = (
        len(pack_rows(half["prompts"], half["responses"], MICRO_BATCH_TOKENS))
        for half in made.split(2)
    )
    assert first > second
    return made


def run(path: str, layout: ParallelLayout, batch: Batch) -> list[dict[str, Any]]:
    return run_ranks(
        two_steps,
        layout.world,
        path,
        layout,
        batch,
        GRPO,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
    )


@pytest.fixture(scope="module")
def one_rank(request: pytest.FixtureRequest, batch: Batch) -> dict[str, list[dict[str, Any]]]:
    return {model: run(request.getfixturevalue(model), ParallelLayout(), batch) for model in MODELS}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_layout_equals_one_rank(
    request: pytest.FixtureRequest, one_rank: Any, batch: Batch, model: str, layout: str
):
    """Tolerances are those of dense models: sums of float32 in another order, and nothing else."""
    path = request.getfixturevalue(model)
    assert_same(run(path, LAYOUTS[layout], batch), one_rank[model])


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_equals_huggingface(
    request: pytest.FixtureRequest, one_rank: Any, batch: Batch, model: str
):
    expected = reference(request.getfixturevalue(model), batch, GRPO)
    (result,) = one_rank[model]
    before = merged([result], "before").values
    assert before.tolist() == pytest.approx(expected["before"].tolist(), rel=1e-5, abs=1e-5)
    for step, metrics in enumerate(result["metrics"]):
        assert metrics["loss"] == pytest.approx(expected["losses"][step], rel=1e-5, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(expected["norms"][step], rel=1e-5)


def shares_prompts(path: str) -> bool:
    return make_engine(path, ParallelLayout())._packed.shares_prompts


@pytest.mark.parametrize("model", MODELS)
def test_prompts_are_computed_once(request: pytest.FixtureRequest, model: str):
    assert run_ranks(shares_prompts, 1, request.getfixturevalue(model)) == [True]


@pytest.mark.parametrize(
    "told",
    [
        {"moe_aux_loss_coeff": 0.01},
        {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-3},
    ],
)
def test_where_tokens_are_counted_by_expert_each_prompt_counts_as_often_as_it_is_there(told: Any):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "num_moe_experts": 2}
    router = {"moe_router_load_balancing_type": "aux_loss", "moe_router_score_function": "sigmoid"}
    config = TransformerConfig(**sizes, **router, **told)
    assert shared_prompts._balances_experts(config)
    config.moe_aux_loss_coeff, config.moe_router_enable_expert_bias = 0.0, False
    assert not shared_prompts._balances_experts(config)


def logprobs(path: str, layout: ParallelLayout, batch: Batch) -> Any:
    engine = make_engine(path, layout, optimizer=None, micro_batch_tokens=MICRO_BATCH_TOKENS)
    return engine.logprobs(my_part(batch, layout))


def test_a_rank_without_responses_joins_the_others(tiny_qwen3_moe: str, batch: Batch):
    responses = batch["responses"]
    rows = [row if place < 6 else row[:0] for place, row in enumerate(responses)]
    batch = batch.select(["prompts", "responses"])
    batch = batch.with_field("responses", batch.axes["responses"], Ragged.from_rows(rows))
    (expected,) = run_ranks(logprobs, 1, tiny_qwen3_moe, ParallelLayout(), batch)
    given = Ragged.concat(run_ranks(logprobs, 2, tiny_qwen3_moe, LAYOUTS["ep2"], batch))
    assert torch.equal(given.offsets, expected.offsets)
    torch.testing.assert_close(given.values, expected.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", [0, -1])
def test_nan_of_one_rank_is_an_error_on_every_rank(tiny_qwen3_moe: str, batch: Batch, row: int):
    advantages = batch["advantages"].clone()
    advantages[row] = float("nan")
    batch = batch.with_field("advantages", batch.axes["advantages"], advantages)
    text = "optimizer step 0: the gradient norm is nan"
    with pytest.raises(RanksFailed, match=text) as failure:
        run(tiny_qwen3_moe, LAYOUTS["ep2"], batch)
    assert str(failure.value).count(text) >= 2
