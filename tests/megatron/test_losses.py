"""Every loss gives one loss and one gradient norm, however its responses are spread and packed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridflow.algorithms import AGGREGATIONS, LOSSES
from hybridflow.algorithms.correction import LEVELS, METHODS
from hybridflow.batch import Batch
from hybridflow.megatron.config import CorrectionSettings, LossSettings, OptimizerSettings
from hybridflow.megatron.rows import check_fields
from hybridflow.recipe.axes import Axis
from megatron_bridge.layout import ParallelLayout
from tests.megatron.cases import make_batch, make_engine, my_part
from tests.ranks import run_ranks

ONE = ParallelLayout()
# Steps too small to move a float32 weight: every loss meets the same model.
MOVING = OptimizerSettings(lr=1e-2)
STILL = OptimizerSettings(lr=1e-30, clip_grad=0.0)
BOUNDS = {"gmpo": (0.4, 0.4), "gspo": (0.1, 0.1), "gspo_token": (0.1, 0.1)}


def settings(name: str) -> LossSettings:
    low, high = BOUNDS.get(name, (0.2, 0.28))
    return LossSettings(
        name=name, clip_low=low, clip_high=high, dual_clip=1.3, tau_negative=2.0, kl_coef=0.05
    )


CASES = {
    **{name: settings(name) for name in LOSSES},
    "responses": replace(settings("gspo"), aggregation="sequence_mean_token_mean"),
    "undivided": replace(settings("sapo"), aggregation="sequence_mean_token_sum"),
    "divided": replace(settings("sapo"), aggregation="constant", loss_divisor=7.0),
    "entropy": replace(settings("ppo_clip"), entropy_coef=0.3),
    "measured": replace(settings("ppo_clip"), measure_entropy=True),
    **{
        f"{method} {level}": replace(
            settings("gspo" if method == "masked" else "ppo_clip"),
            correction=CorrectionSettings(method, level, low=0.8, high=1.3),
            aggregation="sequence_mean_token_mean" if level == "token" else "token_mean",
        )
        for method in METHODS
        for level in LEVELS
    },
    "off-policy": replace(settings("ppo_clip"), off_policy_bound=0.05),
}


def off_policy_batch() -> Batch:
    """The rollout's log-probabilities are near the policy's before the update."""
    batch = make_batch()
    old = batch["rollout_logprobs"]
    generator = torch.Generator().manual_seed(5)
    noise_T = 0.5 * torch.randn(len(old.values), generator=generator)
    near = batch.with_field("old_logprobs", Axis.TOKENS, old)
    return near.with_field("rollout_logprobs", Axis.TOKENS, old.with_values(old.values + noise_T))


def hidden_batch() -> Batch:
    """With final hidden states as another model might have them."""
    batch = off_policy_batch()
    generator = torch.Generator().manual_seed(6)
    hidden_TH = torch.randn(len(batch["responses"].values), 24, generator=generator)
    hidden = batch["responses"].with_values(hidden_TH)
    return batch.with_field("ref_hidden", Axis.TOKENS, hidden)


def masked_batch() -> Batch:
    """Without four responses, two of them a prompt's first and last."""
    mask = torch.ones(12, dtype=torch.bool)
    mask[[1, 3, 5, 10]] = False
    return off_policy_batch().with_field("sample_mask", Axis.SAMPLES, mask)


def measure(path: str, layout: ParallelLayout, batch: Batch, **options: Any) -> dict[str, Any]:
    engine = make_engine(path, layout, optimizer=STILL, keep_reference_head=True, **options)
    part = my_part(batch, layout)
    found = {name: engine.update(part, loss) for name, loss in CASES.items()}
    masked = my_part(masked_batch(), layout)
    for aggregation in AGGREGATIONS:
        loss = replace(settings("ppo_clip"), aggregation=aggregation)
        found[f"masked {aggregation}"] = engine.update(masked, loss)
    full = replace(settings("ppo_clip"), kl_coef=0.3, kl_estimator="full")
    found["full kl"] = engine.update(my_part(hidden_batch(), layout), full)
    return found


@pytest.fixture(scope="module")
def expected(tiny_qwen3: str) -> dict[str, Any]:
    (result,) = run_ranks(measure, 1, tiny_qwen3, ONE, off_policy_batch(), micro_batch_tokens=999)
    return result


LAYOUTS = {
    "small packs": (ONE, 16),
    "dp2": (ParallelLayout(dp=2), 23),
    "tp2pp2": (ParallelLayout(tp=2, pp=2), 32),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_loss_is_the_same_however_it_is_spread(
    tiny_qwen3: str, expected: dict[str, Any], name: str
):
    layout, tokens = LAYOUTS[name]
    result = run_ranks(
        measure, layout.world, tiny_qwen3, layout, off_policy_batch(), micro_batch_tokens=tokens
    )[0]
    for case, metrics in expected.items():
        assert result[case] == pytest.approx(metrics, rel=1e-5, abs=1e-7), case


def test_the_cases_meet_their_bounds(expected: dict[str, Any]):
    """Else a bound that does nothing would pass for one that is invariant."""
    for case, metrics in expected.items():
        assert metrics["grad_norm"] > 0, case
        if "clip_fraction" in metrics:
            assert 0 < metrics["clip_fraction"] < 1, case
    assert 0 < expected["dual_clip"]["dual_clip_fraction"] < 1
    assert expected["gspo"]["loss"] != expected["responses"]["loss"]


def test_the_corrections_correct(expected: dict[str, Any]):
    plain = expected["ppo_clip"]
    for case, metrics in expected.items():
        if "correction_share" in metrics:
            assert 0 < metrics["correction_share"] < 1, case
            assert 0 < metrics["correction_ess"] < 1, case
            assert metrics["loss"] != plain["loss"], case
    assert 0 < expected["off-policy"]["off_policy_masked"] < 1
    for metric in ("loss", "grad_norm"):
        assert expected["off-policy"][metric] != pytest.approx(plain[metric], rel=1e-3)
    assert expected["entropy"]["entropy"] == expected["measured"]["entropy"] > 0
    assert expected["measured"]["loss"] == plain["loss"]
    gain = plain["loss"] - expected["entropy"]["loss"]
    assert gain == pytest.approx(0.3 * expected["entropy"]["entropy"], rel=1e-4)


def test_a_masked_response_is_as_good_as_absent(tiny_qwen3: str):
    """The loss of a prompt's one response, its others masked, is that of the response alone."""
    batch = off_policy_batch().slice(0, 1)
    mask = torch.tensor([False, True, False])
    alone = {
        name: (axis, batch[name] if axis is Axis.PROMPTS else batch[name][1:2])
        for name, axis in batch.axes.items()
    }
    single = Batch(
        {name: data for name, (_, data) in alone.items()},
        {name: axis for name, (axis, _) in alone.items()},
        prompts=1,
        samples_per_prompt=1,
    )
    batches = [batch.with_field("sample_mask", Axis.SAMPLES, mask), single]
    masked, expected = run_ranks(updates, 1, tiny_qwen3, batches)[0]
    assert masked == pytest.approx(expected, rel=1e-5, abs=1e-7)


def rejected(path: str, kept: Batch) -> dict[str, Any]:
    """Losses of whole responses without the tokens that a bound rejects, and without those that a
    mask names; the KL from the old policy by hand."""
    engine = make_engine(path, ONE, optimizer=STILL)
    batch, now = off_policy_batch(), engine.logprobs(off_policy_batch())
    assert now is not None
    correction = CorrectionSettings("rejection", "token", low=0.8, high=1.3)
    found: dict[str, Any] = {}
    for name in ("gspo", "gspo_token", "gmpo", "ppo_clip"):
        loss = replace(settings(name), measure_entropy=True)
        found[name] = (
            engine.update(batch, replace(loss, correction=correction)),
            engine.update(kept, loss),
        )
    gap_T = (batch["old_logprobs"].values - now.values).double()
    policy_kl = (torch.exp(-gap_T) - 1 + gap_T).mean().item()
    return found | {"policy_kl": (policy_kl, engine.update(batch, settings("gspo"))["policy_kl"])}


def test_what_is_rejected_is_not_seen_by_losses_of_whole_responses(tiny_qwen3: str):
    batch = off_policy_batch()
    ratio_T = (batch["old_logprobs"].values - batch["rollout_logprobs"].values).exp()
    inside = batch["responses"].with_values((ratio_T >= 0.8) & (ratio_T <= 1.3))
    kept = batch.with_field("response_mask", Axis.TOKENS, inside)
    (found,) = run_ranks(rejected, 1, tiny_qwen3, kept)
    by_hand, policy_kl = found.pop("policy_kl")
    assert policy_kl == pytest.approx(by_hand, rel=1e-4) and by_hand > 0.01
    for name, (rejecting, masked) in found.items():
        assert 0 < rejecting["correction_share"] < 1
        same = masked.keys() - {"rollout_gap_mean", "rollout_gap_max", "rollout_gap_share"}
        for metric in same - {"rollout_kl", "old_gap_mean"}:  # which see all tokens
            given = pytest.approx(masked[metric], rel=1e-5, abs=1e-7)
            assert rejecting[metric] == given, (name, metric)


def from_itself(path: str, layout: ParallelLayout, folder: Path) -> dict[str, float]:
    engine = make_engine(path, layout, optimizer=MOVING, keep_reference_head=True)
    part = my_part(off_policy_batch(), layout)
    engine.update(part, settings("ppo_clip"))  # as a warm start, from which the reference begins
    engine.save_pretrained(folder)
    engine.load_pretrained(folder)
    engine.begin_stage(MOVING)
    responses, hidden = part["responses"], engine.hidden(part)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, hidden)
    (mine,) = [s for s in states if s is not None and torch.equal(s.offsets, responses.offsets)]
    part = part.with_field("ref_hidden", Axis.TOKENS, mine)
    loss = replace(settings("ppo_clip"), kl_coef=0.3, kl_estimator="full", temperature=0.8)
    before, after = engine.update(part, loss), engine.update(part, loss)
    return {"before": before["kl"], "after": after["kl"]}


@pytest.mark.parametrize("layout", [ONE, ParallelLayout(tp=2, pp=2)], ids=["one", "tp2pp2"])
@pytest.mark.parametrize("kind", ["tiny_qwen3", "tied_qwen3"])
def test_the_whole_kl_grows_from_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, layout: ParallelLayout
):
    """Its own hidden states under its own head are the policy; after a step they no longer are."""
    path = request.getfixturevalue(kind)
    result = run_ranks(from_itself, layout.world, path, layout, tmp_path / "model")[0]
    assert result["before"] == pytest.approx(0, abs=1e-6) and result["after"] > 1e-4


def test_everything_masked_moves_nothing(tiny_qwen3: str):
    """One rank has no response left, or none has: the step goes on with what is left."""
    batch = off_policy_batch()
    mask = torch.arange(12) >= 6
    half, none = (
        batch.with_field("sample_mask", Axis.SAMPLES, values)
        for values in (mask, torch.zeros_like(mask))
    )
    layout = ParallelLayout(dp=2)
    left, nothing = run_ranks(updates, 2, tiny_qwen3, [half, none], layout)[0]
    assert left["grad_norm"] > 0 and left["tokens"] > 0
    assert nothing["grad_norm"] == nothing["loss"] == nothing["tokens"] == 0
    assert nothing["skipped_steps"] == 1 and left["skipped_steps"] == 0


def masked_steps(
    path: str, layout: ParallelLayout, half: Batch, rest: Batch
) -> tuple[dict[str, float], list[bool]]:
    """An update of two mini-batches of which the first is masked: its metrics; whether nothing
    moves without a token, and whether the second moves the weights as it would alone."""
    loss = settings("ppo_clip")
    engine, other = (make_engine(path, layout) for _ in range(2))
    for each in (engine, other):  # so that Adam has momentum
        each.update(my_part(half, layout), loss)
    weights = [tensor.clone() for _, tensor in engine.export_weights()]
    nothing = torch.zeros(half.samples, dtype=torch.bool)
    masked = half.with_field("sample_mask", Axis.SAMPLES, nothing)
    engine.update(my_part(masked, layout), loss)
    still = all(map(torch.equal, weights, [tensor for _, tensor in engine.export_weights()]))
    kept = rest.with_field("sample_mask", Axis.SAMPLES, ~nothing)
    parts = Batch.concat([my_part(masked, layout), my_part(kept, layout)])
    sampled = engine.logprobs(parts)
    assert sampled is not None
    parts = parts.with_field("rollout_logprobs", Axis.TOKENS, sampled)
    metrics = engine.update(parts, replace(loss, mini_batches=2, agreement_bound=1e-4))
    other.update(my_part(kept, layout), loss)
    pairs = zip(engine.export_weights(), other.export_weights(), strict=True)
    return metrics, [still, all(torch.equal(one, two) for (_, one), (_, two) in pairs)]


@pytest.mark.parametrize("layout", [ONE, ParallelLayout(dp=2)], ids=["one", "dp2"])
def test_a_masked_mini_batch_takes_no_step(tiny_qwen3: str, layout: ParallelLayout):
    """Neither momentum nor weight decay moves a weight, and the schedule stands still."""
    batch = off_policy_batch()
    half, rest = batch.slice(0, 2), batch.slice(2, 4)
    results = run_ranks(masked_steps, layout.world, tiny_qwen3, layout, half, rest)
    for metrics, as_wanted in results:
        assert as_wanted == [True, True] and metrics["skipped_steps"] == 1
        assert metrics["grad_norm"] > 0 and metrics["tokens"] == len(rest["responses"].values)
        assert metrics["rollout_gap_max"] < 1e-4  # of the second mini-batch, by its own tokens


def updates(
    path: str, batches: list[Batch], layout: ParallelLayout = ONE
) -> list[dict[str, float]]:
    engine = make_engine(path, layout, optimizer=STILL)
    return [engine.update(my_part(batch, layout), settings("ppo_clip")) for batch in batches]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            {"correction": CorrectionSettings("masked", "token", 0.5, 2.0)},
            "algorithm.rollout_correction needs the field 'old_logprobs'",
        ),
        ({"agreement_bound": 0.1}, "algorithm.agreement.bound needs the field 'rollout_logprobs'"),
        ({"off_policy_bound": 0.1}, "algorithm.off_policy_mask needs the field"),
    ],
)
def test_settings_name_the_field_that_they_lack(change: dict[str, Any], what: str):
    batch = make_batch()
    if "correction" not in change:
        batch = batch.select(name for name in batch.fields if name != "rollout_logprobs")
    with pytest.raises(ValueError, match=what):
        check_fields(batch, replace(settings("ppo_clip"), **change))


def test_the_divisor_divides(expected: dict[str, Any]):
    whole, seventh = (expected[case]["grad_norm"] for case in ("undivided", "divided"))
    assert whole == pytest.approx(7 * seventh, rel=1e-5)


def test_advantages_per_token_are_refused_for_whole_responses():
    batch = off_policy_batch()
    per_token = batch["responses"].with_values(torch.ones(len(batch["responses"].values)))
    batch = batch.with_field("advantages", Axis.TOKENS, per_token)
    with pytest.raises(ValueError, match="'gmpo' takes one advantage per response"):
        check_fields(batch, settings("gmpo"))
    check_fields(batch, settings("gspo_token"))


def test_old_logprobs_are_needed_by_losses_that_compare_policies():
    batch = make_batch()
    for name, loss in LOSSES.items():
        if loss.compares_policies:
            with pytest.raises(ValueError, match="need the field 'old_logprobs'"):
                check_fields(batch, replace(settings(name), epochs=2))
        else:
            check_fields(batch, replace(settings(name), epochs=2))
