"""A critic: values as HuggingFace computes them, and one loss at every layout and packing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config

from hybridflow.batch import Batch, Ragged
from hybridflow.cluster.transfer import DATA_PARALLEL
from hybridflow.megatron.config import OptimizerSettings, ValueLossSettings
from hybridflow.recipe.axes import Axis
from hybridflow.workers.model import ModelWorker
from megatron_bridge.layout import ParallelLayout
from tests.megatron.cases import make_batch, make_engine, merged, my_part
from tests.ranks import RanksFailed, run_ranks

ONE = ParallelLayout()
# Steps too small to move a float32 weight: every loss meets the same model.
STILL = OptimizerSettings(lr=1e-30, clip_grad=0.0)
CASES = {
    "value_clip": ValueLossSettings(clip=0.3),
    "value_mse": ValueLossSettings("value_mse"),
    "responses": ValueLossSettings(clip=0.3, aggregation="sequence_mean_token_mean"),
    "undivided": ValueLossSettings("value_mse", aggregation="sequence_mean_token_sum"),
}


@pytest.fixture(scope="module")
def critic(tiny_qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a head of some size, as transformers saves it."""
    folder = tmp_path_factory.mktemp("critic")
    config = Qwen3Config.from_pretrained(tiny_qwen3, num_labels=1, pad_token_id=0)
    torch.manual_seed(5)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return str(folder)


def value_batch() -> Batch:
    batch = make_batch()
    generator = torch.Generator().manual_seed(1)
    for name in ("values", "returns"):
        numbers = torch.randn(len(batch["responses"].values), generator=generator)
        batch = batch.with_field(name, Axis.TOKENS, batch["responses"].with_values(numbers))
    return batch


def measure(path: str, layout: ParallelLayout, batch: Batch, **options: Any) -> dict[str, Any]:
    engine = make_engine(path, layout, optimizer=STILL, head="value", **options)
    part = my_part(batch, layout)
    values = engine.values(part)
    return {"values": values} | {n: engine.update_values(part, loss) for n, loss in CASES.items()}


@pytest.fixture(scope="module")
def expected(critic: str) -> dict[str, Any]:
    (result,) = run_ranks(measure, 1, critic, ONE, value_batch(), micro_batch_tokens=999)
    return result


def test_values_are_huggingfaces(critic: str, expected: dict[str, Any]):
    model = AutoModelForSequenceClassification.from_pretrained(critic)
    batch, rows = value_batch(), []
    with torch.no_grad():
        for row, response in enumerate(batch["responses"].rows()):
            prompt = batch["prompts"][row // batch.samples_per_prompt]
            ids = torch.cat([prompt, response])[None, :-1]
            hidden = model.model(ids).last_hidden_state
            rows.append(model.score(hidden)[0, len(prompt) - 1 :, 0])
    wanted = Ragged.from_rows(rows)
    assert expected["values"].dtype == torch.float32 and wanted.values.std() > 0.1
    torch.testing.assert_close(expected["values"].values, wanted.values, rtol=0, atol=1e-5)


LAYOUTS = {
    "small packs": (ONE, 16),
    "dp2": (ParallelLayout(dp=2), 23),
    "tp2pp2": (ParallelLayout(tp=2, pp=2), 32),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_losses_and_gradient_norms_are_the_same_however_they_are_spread(
    critic: str, expected: dict[str, Any], name: str
):
    layout, tokens = LAYOUTS[name]
    results = run_ranks(
        measure, layout.world, critic, layout, value_batch(), micro_batch_tokens=tokens
    )
    given = merged(results, "values")
    torch.testing.assert_close(given.values, expected["values"].values, rtol=1e-5, atol=1e-5)
    for case in CASES:
        wanted = expected[case]
        assert results[0][case] == pytest.approx(wanted, rel=1e-5, abs=1e-7), case
        assert wanted["grad_norm"] > 0 and 0 < wanted.get("clip_fraction", 0.5) < 1


def fresh_values(path: str, layout: ParallelLayout, **options: Any) -> dict[str, Any]:
    engine = make_engine(path, layout, optimizer=None, head="value", **options)
    return {"values": engine.values(my_part(make_batch(), layout))}


def test_a_new_head_is_the_same_at_every_layout_and_says_nearly_nothing(tiny_qwen3: str):
    (one,) = run_ranks(fresh_values, 1, tiny_qwen3, ONE, seed=3)
    other = run_ranks(fresh_values, 4, tiny_qwen3, ParallelLayout(tp=2, dp=2), seed=3)
    first = one["values"].values
    torch.testing.assert_close(merged(other, "values").values, first, rtol=1e-4, atol=1e-7)
    assert 0 < first.abs().max() < 0.1
    (half,) = run_ranks(fresh_values, 1, tiny_qwen3, ONE, seed=3, dtype=torch.bfloat16)
    assert half["values"].dtype == torch.float32
    torch.testing.assert_close(half["values"].values, first, rtol=0, atol=2e-3)
    (reseeded,) = run_ranks(fresh_values, 1, tiny_qwen3, ONE, seed=4)
    assert not torch.equal(reseeded["values"].values, first)


def learn(path: str, layout: ParallelLayout, folder: Path) -> dict[str, Any]:
    """A critic fits its returns; two steps, a checkpoint, two more, and these again from it."""
    optimizer = OptimizerSettings(lr=1e-2)
    part, loss = my_part(value_batch(), layout), ValueLossSettings("value_mse")
    engine = make_engine(path, layout, optimizer=optimizer, head="value")
    first = [engine.update_values(part, loss) for _ in range(2)]
    engine.save_checkpoint(folder / "state")
    then = [engine.update_values(part, loss) for _ in range(2)]
    engine.save_pretrained(folder / "model")
    engine = make_engine(path, layout, optimizer=optimizer, head="value")
    engine.load_checkpoint(folder / "state")
    again = [engine.update_values(part, loss) for _ in range(2)]
    exported = make_engine(str(folder / "model"), layout, optimizer=None, head="value")
    return {
        "first": first,
        "then": then,
        "again": again,
        "values": engine.values(part),
        "exported": exported.values(part),
    }


def test_a_critic_learns_is_saved_and_goes_on_bit_for_bit(tiny_qwen3: str, tmp_path: Path):
    results = run_ranks(learn, 2, tiny_qwen3, ParallelLayout(pp=2), tmp_path)
    assert results[0]["again"] == results[0]["then"]
    losses = [metrics["loss"] for metrics in results[0]["first"] + results[0]["then"]]
    assert losses == sorted(losses, reverse=True)
    assert merged(results, "exported").equals(merged(results, "values"))


def refused(path: str, head: str, call: str) -> None:
    engine = make_engine(path, ONE, optimizer=None, head=head)
    getattr(engine, call)(make_batch())


def test_the_head_must_fit(tiny_qwen3: str, critic: str, tmp_path: Path):
    with pytest.raises(RanksFailed, match="ends in the value, not in the vocabulary"):
        run_ranks(refused, 1, critic, "value", "logprobs")
    with pytest.raises(RanksFailed, match="ends in scores, not in the vocabulary"):
        run_ranks(refused, 1, critic, "vocabulary", "logprobs")
    config = Qwen3Config.from_pretrained(tiny_qwen3, num_labels=2, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(RanksFailed, match="ends in 2 scores and a value head has one"):
        run_ranks(refused, 1, str(tmp_path), "value", "values")


def reward_of(path: str, layout: ParallelLayout, batch: Batch, **options: Any) -> dict[str, Any]:
    engine = make_engine(path, layout, optimizer=None, head="value", **options)
    worker = object.__new__(ModelWorker)  # without a process group of its own
    worker._engine = engine
    scored = worker.score(my_part(batch, layout))
    return {"rewards": None if scored is None else scored["rewards"]}


@pytest.mark.parametrize("layout", [ONE, ParallelLayout(tp=2, dp=2)], ids=["one", "tp2dp2"])
def test_a_reward_model_scores_what_huggingface_reads_at_the_last_token(
    critic: str, layout: ParallelLayout
):
    model = AutoModelForSequenceClassification.from_pretrained(critic)
    batch, wanted = make_batch(), []
    with torch.no_grad():
        for row, response in enumerate(batch["responses"].rows()):
            prompt = batch["prompts"][row // batch.samples_per_prompt]
            hidden = model.model(torch.cat([prompt, response])[None]).last_hidden_state
            wanted.append(model.score(hidden)[0, -1, 0])
    results = run_ranks(reward_of, layout.world, critic, layout, batch, micro_batch_tokens=48)
    found = [results[rank]["rewards"] for rank in DATA_PARALLEL.sources(layout)]
    torch.testing.assert_close(torch.cat(found), torch.stack(wanted), rtol=0, atol=1e-5)


def test_a_reward_that_is_no_number_ends_the_run(critic: str, tmp_path: Path):
    model = AutoModelForSequenceClassification.from_pretrained(critic)
    model.score.weight.data[0, 3] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(RanksFailed, match="the reward model gives nan for sample 0 of its share"):
        run_ranks(reward_of, 1, str(tmp_path), ONE, make_batch())


def two_critic_steps(path: str, layout: ParallelLayout, batch: Batch) -> dict[str, Any]:
    engine = make_engine(
        path, layout, optimizer=OptimizerSettings(lr=1e-2), head="value", micro_batch_tokens=20
    )
    part, loss = my_part(batch, layout), ValueLossSettings("value_mse")
    before = engine.values(part)
    metrics = [engine.update_values(part, loss) for _ in range(2)]
    return {"before": before, "metrics": metrics, "after": engine.values(part)}


EXPERTS = {
    "tp2ep2": ParallelLayout(tp=2, dp=2, ep=2),
    "ep2-in-tp2": ParallelLayout(tp=2, ep=2, etp=1),
    "pp2ep2": ParallelLayout(pp=2, dp=2, ep=2, first_stage_layers=1),
}


@pytest.fixture(scope="module")
def one_rank_with_experts(tiny_qwen3_moe: str) -> dict[str, Any]:
    return run_ranks(two_critic_steps, 1, tiny_qwen3_moe, ONE, value_batch())[0]


@pytest.mark.parametrize("layout", EXPERTS)
def test_a_critic_with_experts_trains_as_on_one_rank(
    tiny_qwen3_moe: str, one_rank_with_experts: dict[str, Any], layout: str
):
    spread, one = EXPERTS[layout], one_rank_with_experts
    results = run_ranks(two_critic_steps, spread.world, tiny_qwen3_moe, spread, value_batch())
    for given, wanted in zip(results[0]["metrics"], one["metrics"], strict=True):
        assert given == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    for name in ("before", "after"):
        values = merged(results, name).values
        torch.testing.assert_close(values, one[name].values, rtol=1e-3, atol=1e-4)
    assert (one["before"].values - one["after"].values).abs().max() > 1e-3
