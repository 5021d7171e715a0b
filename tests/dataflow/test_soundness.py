"""Mistakes that would train in silence: each is an error where it arises, or cannot be made.

Those of single workers are beside their own: rewards that are constant or not finite and token
rewards at special tokens in tests/rewards, ratios in tests/megatron/test_update.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.algorithms import kl as kl_module
from hybridflow.algorithms.kl import kl_divergence
from hybridflow.algorithms.losses import Loss, TokenInputs, TokenLoss
from hybridflow.algorithms.packing import pack_rows
from hybridflow.algorithms.values import VALUE_LOSSES, ValueInputs
from hybridflow.batch import Batch, Ragged
from hybridflow.cluster import LocalSession
from hybridflow.dataflow.launch import LaunchOptions, train
from hybridflow.dataflow.runner import SerialRunner
from hybridflow.dataflow.soundness import old_is_current, require_sound
from hybridflow.dataflow.warnings import Watch
from hybridflow.megatron.config import LossSettings
from hybridflow.megatron.rows import check_fields
from hybridflow.monitor import read_events, read_metrics
from hybridflow.recipe.axes import Axis, FieldType
from hybridflow.recipe.compile import compile_recipe
from hybridflow.recipe.graph import Graph, Node, fields
from hybridflow.recipe.registry import Registry

REWARDS = {"rewards": FieldType(Axis.SAMPLES, "float")}
MASK = {"mask": FieldType(Axis.SAMPLES, "bool")}
LOGPROBS = {"logprobs": FieldType(Axis.TOKENS, "float")}


def ragged(values: Tensor) -> Ragged:
    return Ragged(values, torch.tensor([0, 1, 4]))


@pytest.mark.parametrize(
    ("types", "axis", "data", "message"),
    [
        (
            REWARDS,
            Axis.SAMPLES,
            torch.ones(2).double(),
            "'rewards' as float64; it is float32.*float",
        ),
        (REWARDS, Axis.SAMPLES, torch.ones(2).half(), "'rewards' as float16"),
        (
            REWARDS,
            Axis.SAMPLES,
            torch.ones(2, dtype=torch.int64),
            "'rewards' as int64; it is float32",
        ),
        (
            REWARDS,
            Axis.SAMPLES,
            torch.ones(2, 3),
            r"'rewards' of shape \[2, 3\]; it has one number",
        ),
        (
            REWARDS,
            Axis.SAMPLES,
            torch.tensor([0.0, torch.nan]),
            "gives nan in 'rewards' for sample 1",
        ),
        (REWARDS, Axis.PROMPTS, torch.ones(2), "'rewards' by prompts; it is by samples"),
        (MASK, Axis.SAMPLES, torch.ones(2), "'mask' as float32; it is bool: compare, such as"),
        (MASK, Axis.SAMPLES, torch.ones(2, dtype=torch.int64), "'mask' as int64; it is bool"),
        (
            LOGPROBS,
            Axis.TOKENS,
            ragged(torch.tensor([0.0, 0.0, -torch.inf, 0.0])),
            "gives -inf in 'logprobs' for sample 1, token 1",
        ),
    ],
)
def test_what_a_node_gives_is_held_against_its_signature(
    types: dict[str, FieldType], axis: Axis, data: Any, message: str
) -> None:
    (name,) = types
    batch = Batch({name: data}, {name: axis}, 2, 1)
    with pytest.raises(
        ValueError, match=f"^node 'n' gives {message}" if "gives" not in message else message
    ):
        require_sound("n", types, batch)


def test_what_fits_is_let_through() -> None:
    batch = Batch(
        {
            "rewards": torch.ones(2),
            "logprobs": ragged(torch.zeros(4)),
            "more": torch.ones(2).double(),
        },
        {"rewards": Axis.SAMPLES, "logprobs": Axis.TOKENS, "more": Axis.SAMPLES},
        2,
        1,
    )
    require_sound("n", {**REWARDS, **LOGPROBS, **MASK}, batch)


def test_padded_tokens_are_no_field() -> None:
    """Nothing between roles is padded: a padded tensor, with whatever id, is refused by name."""
    with pytest.raises(ValueError, match="field 'responses': a tokens field is Ragged, got Tensor"):
        Batch({"responses": torch.zeros(2, 5).long()}, {"responses": Axis.TOKENS}, 2, 1)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=4),
            st.lists(st.integers(0, 9), max_size=4),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_trainer_sees_the_tokens_of_the_batch_and_no_other(
    rows: list[tuple[list[int], list[int]]],
) -> None:
    """So no pad id, of the tokenizer's or another, can take part in a loss."""
    prompts = Ragged.from_rows([prompt for prompt, _ in rows], torch.int64)
    responses = Ragged.from_rows([response for _, response in rows], torch.int64)
    packs = pack_rows(prompts, responses, 64)
    seen = sorted(token for pack in packs for token in pack.input_ids_T.tolist())
    inputs = [[*p, *r][:-1] for p, r in rows if r]
    assert seen == sorted(token for row in inputs for token in row)
    labels = sorted(token for pack in packs for token in pack.labels_R.tolist())
    assert labels == sorted(responses.values.tolist())


def update_batch(**more: Any) -> Batch:
    given = {
        "prompts": (Axis.PROMPTS, Ragged.from_rows([[1], [2]], torch.int64)),
        "responses": (Axis.TOKENS, ragged(torch.arange(4))),
        "advantages": (Axis.SAMPLES, torch.ones(2)),
        **more,
    }
    data = {name: value for name, (_, value) in given.items()}
    return Batch(data, {name: axis for name, (axis, _) in given.items()}, 2, 1)


@pytest.mark.parametrize(
    ("name", "axis", "mask"),
    [
        ("sample_mask", Axis.SAMPLES, torch.ones(2, dtype=torch.int64)),
        ("response_mask", Axis.TOKENS, ragged(torch.ones(4))),
    ],
)
def test_a_mask_of_an_update_is_bool(name: str, axis: Axis, mask: Any) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is a mask of .*; it is bool: compare"):
        check_fields(update_batch(**{name: (axis, mask)}), LossSettings())


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match="no field 'old_logprob': valid|did you mean"):
        update_batch()["old_logprob"]
    with pytest.raises(ValueError, match="need the field 'old_logprobs'"):
        check_fields(update_batch(), LossSettings(epochs=2))
    batch = update_batch().select(["prompts", "responses"])
    with pytest.raises(ValueError, match="'ppo_clip' needs the field 'advantages'"):
        check_fields(batch, LossSettings())


def test_a_detached_kl_term(monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs_T = torch.zeros(3, requires_grad=True)
    for name in kl_module.ESTIMATORS:
        assert kl_divergence(logprobs_T, torch.ones(3), name).requires_grad
    detached = Registry("KL estimator", {"k1": lambda difference_T: difference_T.detach()})
    monkeypatch.setattr(kl_module, "ESTIMATORS", detached)
    with pytest.raises(ValueError, match="'k1' detaches the KL term from the log-probabilities"):
        kl_divergence(logprobs_T, torch.ones(3), "k1")
    with torch.no_grad():
        kl_divergence(logprobs_T, torch.ones(3), "k1")


def test_shapes_that_would_be_spread_over_each_other() -> None:
    """``[T]`` beside ``[T, 1]`` would make ``[T, T]`` without a word."""
    loss = Loss(lambda inputs: TokenLoss(inputs.logprobs_T), needs_advantages=True)
    ones_T, ones_T1 = torch.ones(3), torch.ones(3, 1)
    with pytest.raises(ValueError, match=r"'advantages' has the shape \[3, 1\] and .* \[3\]"):
        loss(TokenInputs(ones_T, ones_T, ones_T1))
    with pytest.raises(ValueError, match=r"'old_logprobs' has the shape \[3, 1\]"):
        loss(TokenInputs(ones_T, ones_T1, ones_T))
    with pytest.raises(ValueError, match=r"'ref_logprobs' has the shape \[3, 1\]"):
        kl_divergence(ones_T, ones_T1)


def test_a_critics_output_of_the_wrong_shape() -> None:
    ones_T, ones_T1 = torch.ones(3), torch.ones(3, 1)
    with pytest.raises(ValueError, match=r"'returns' has the shape \[3\] and .* output \[3, 1\]"):
        VALUE_LOSSES["value_mse"](ValueInputs(ones_T1, ones_T))
    with pytest.raises(ValueError, match=r"'values' has the shape \[3, 1\]"):
        VALUE_LOSSES["value_clip"](ValueInputs(ones_T, ones_T, ones_T1))
    batch = Batch({"values": ragged(torch.ones(4, 2))}, {"values": Axis.TOKENS}, 2, 1)
    with pytest.raises(ValueError, match=r"'values' of shape \[4, 2\]; it has one number for each"):
        require_sound("critic", {"values": FieldType(Axis.TOKENS, "float")}, batch)


def test_a_detached_loss() -> None:
    loss = Loss(lambda inputs: TokenLoss(-inputs.logprobs_T.detach()), needs_advantages=False)
    logprobs_T = torch.zeros(3, requires_grad=True)
    with pytest.raises(ValueError, match="the loss is detached from the log-probabilities"):
        loss(TokenInputs(logprobs_T, torch.zeros(3), None))


def graph_of(*nodes: Node) -> Graph:
    generate = Node("g", "rollout", "generate", None, fields("prompts"), fields("responses"))
    return Graph.build(["prompts"], [generate, *nodes])


def logprobs_of(role: str) -> Node:
    return Node("o", role, "logprobs", None, fields("prompts", "responses"), fields(logprobs="old"))


def update(name: str = "u", **more: Any) -> Node:
    taken = fields("prompts", "responses", old_logprobs="old")
    return Node(name, "actor", "update", None, taken, options={"loss": "ppo_clip"}, **more)


def test_when_the_ratio_must_be_one() -> None:
    """The old policy is this step's actor, and no update lies between."""
    actor, last = logprobs_of("actor"), update()
    assert old_is_current(graph_of(actor, last), last)
    delayed = update(delay={"old": 1})
    assert not old_is_current(graph_of(actor, delayed), delayed)
    first = update("first")
    both = graph_of(actor, first, last)
    assert old_is_current(both, first) and not old_is_current(both, last)
    assert not old_is_current(graph_of(logprobs_of("reference"), last), last)


def zero_share(share: float) -> dict[str, float]:
    return {"advantage/zero_share": share, "reward/mean": 0.5}


@pytest.mark.parametrize(
    ("metric", "fine", "suspicious", "steps", "text"),
    [
        ("update/skipped_steps", 0.0, 2.0, 1, "2 mini-batches have no token"),
        ("update/correction_share", 0.9, 1.0, 1, "out of algorithm.rollout_correction's bounds"),
        ("update/rollout_gap_mean", 0.02, 0.5, 1, "differ by 0.5 nats a token"),
        ("cost_critic/explained_variance", 0.1, -0.1, 10, "worse than a constant"),
    ],
)
def test_what_an_update_tells_of(metric, fine, suspicious, steps, text) -> None:
    watch = Watch(steps=99)
    assert watch.see(1, {metric: fine}) == []
    told = [watch.see(step, {metric: suspicious}) for step in range(2, 2 + steps)]
    assert told[:-1] == [[]] * (steps - 1) and text in told[-1][0]


def test_warnings_are_told_when_they_begin() -> None:
    watch = Watch(steps=20)
    assert watch.see(1, {**zero_share(0.5), "reward/constant": 1.0}) == []
    (text,) = watch.see(2, zero_share(1.0))
    assert text.startswith("step 2: every advantage is 0")
    assert watch.see(3, zero_share(1.0)) == []
    assert watch.see(4, zero_share(0.0)) == []
    assert len(watch.see(5, zero_share(1.0))) == 1
    told = [watch.see(step, {"reward/constant": 1.0}) for step in range(6, 20)]
    assert [len(texts) for texts in told] == [0] * 8 + [1] + [0] * 5
    short = Watch(steps=2)
    assert short.see(1, {"reward/constant": 1.0}) == []
    assert "one number" in short.see(2, {"reward/constant": 1.0})[0], "a run that was so to its end"
    assert Watch(20).see(1, {"advantage/zero_share": 1.0}) == [], "no reward, no such advice"


def test_counting_goes_on_after_a_resume() -> None:
    before = Watch(steps=99)
    for step in range(1, 9):
        assert before.see(step, {"reward/constant": 1.0}) == []
    after = Watch(steps=99)
    after.restore(json.loads(json.dumps(before.saved())))
    assert after.see(9, {"reward/constant": 1.0}) == []
    assert "one number" in after.see(10, {"reward/constant": 1.0})[0]


def test_failures_and_further_rewards_are_told_by_their_metric() -> None:
    watch = Watch(steps=3)
    (text,) = watch.see(1, {"reward/judge/errors": 64.0, "reward/judge/timeouts": 0.0})
    assert text.startswith("step 1: 64 samples have the value of on_error, since their function")
    assert "(reward/judge/errors)" in text
    constant = {"reward/costs/constant": 1.0, "reward/good_share": 0.0}
    assert watch.see(2, constant) == []
    first, second = watch.see(3, constant)
    assert "(reward/costs/constant)" in first and "reward/good_share is 0" in second


def test_a_run_without_signal_says_so(make_recipe, tmp_path) -> None:
    """A reward that never differs, groups of it, and a reward of another type by the way."""
    path = tmp_path / "mine.py"
    path.write_text("def same(prompt, response, answer, row):\n    return 0.25\n")
    told = ("warm_start=null", "evaluation=null", "steps=2", f"roles.reward.function={path}:same")
    plan = compile_recipe(make_recipe(*told, "data.source_column=answer"))
    folder = train(plan, lambda logs: LocalSession(), LaunchOptions(live=False), SerialRunner())
    for row in read_metrics(folder):
        assert row["metrics"]["advantage/zero_share"] == row["metrics"]["reward/constant"] == 1
        sources = {n: v for n, v in row["metrics"].items() if n.startswith("reward/source/")}
        assert sources and set(sources.values()) == {0.25}
    texts = [event["text"] for event in read_events(folder) if event["kind"] == "warning"]
    assert [text.split(" (")[0] for text in texts] == [
        "step 1: every advantage is 0",
        "step 2: all rewards of a step are one number, step after step",
        "step 2: every response is cut off at max_tokens",
    ]


@pytest.mark.slow
def test_a_group_of_one_ends_the_run(make_recipe) -> None:
    """`hybridflow check` finds it before; a plan that was never checked meets it in the step."""
    plan = compile_recipe(make_recipe("warm_start=null", "data.samples_per_prompt=1"))
    with pytest.raises(
        RuntimeError, match="group_relative compares samples of a prompt, and each has 1"
    ):
        train(plan, lambda logs: LocalSession(), LaunchOptions(live=False), SerialRunner())
