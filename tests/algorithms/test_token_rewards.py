"""PPO over the rewards of single tokens, beside a loop in double precision."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms import FUNCTIONS, FunctionContext
from hybridflow.algorithms.functions import GaeSettings
from hybridflow.batch import Batch, Ragged
from hybridflow.recipe.axes import Axis
from tests.algorithms.test_critic import loop

SCORES, KINDS = st.floats(-3, 3, width=32), {"k1": 0.3, "k2": 0.2, "k3": 0.1}
TOKEN = st.tuples(SCORES, SCORES, st.floats(-9, 0, width=32), st.floats(-9, 0, width=32))
ROWS = st.lists(st.lists(TOKEN, max_size=7), min_size=1, max_size=5)
NAMES = ("token_scores", "values", "logprobs", "ref_logprobs")


def batch_of(rows, outcomes: list[float]) -> Batch:
    """Fields of tokens from their rows, one response of each prompt."""
    fields = {
        name: Ragged.from_rows([[token[i] for token in row] for row in rows], dtype=torch.float32)
        for i, name in enumerate(NAMES)
    }
    fields["responses"] = fields["values"]
    axes = dict.fromkeys(fields, Axis.TOKENS)
    batch = Batch(fields, axes, len(rows), 1)
    return batch.with_field("rewards", Axis.SAMPLES, torch.tensor(outcomes))


def penalty(estimator: str, gap: float) -> float:
    """The KL of one token: Schulman's three estimators of log p - log q = gap."""
    return {"k1": gap, "k2": gap**2 / 2, "k3": math.expm1(-gap) + gap}[estimator]


def by_hand(rows, coef: float, estimator: str, whitened: bool) -> list[list[float]]:
    """What every token is given: its score less its KL, over the deviation of all."""
    given_ = [[s - coef * penalty(estimator, p - q) for s, _, p, q in row] for row in rows]
    flat = [reward for row in given_ for reward in row]
    if not whitened:
        return given_
    mean, scale = statistics.fmean(flat), math.sqrt(statistics.variance(flat) + 1e-8)
    return [[(reward - mean) / scale + mean for reward in row] for row in given_]


@settings(deadline=None, max_examples=40)
@given(ROWS, st.sampled_from([*KINDS]), st.booleans(), st.floats(0.8, 1.0), st.floats(0.0, 1.0))
def test_gae_over_token_scores_with_the_kl(rows, estimator, whitened, gamma, lam):
    coef = KINDS[estimator]
    flat = [s - coef * penalty(estimator, p - q) for row in rows for s, _, p, q in row]
    # Whitening divides by the deviation: where it is near 0, so is what a comparison can tell.
    whitened = whitened and len(flat) > 1 and statistics.stdev(flat) > 0.1
    told = GaeSettings(gamma, lam, whiten_rewards=whitened, whiten_advantages=False)
    context = FunctionContext(kl_coef=coef, kl_estimator=estimator, gae=told)
    batch = batch_of(rows, [5.0] * len(rows))
    rewards = FUNCTIONS["token_rewards"](batch, context)["token_rewards"]
    expected = by_hand(rows, coef, estimator, whitened)
    wanted_T = torch.tensor([r for row in expected for r in row], dtype=torch.float64)
    torch.testing.assert_close(rewards.values.double(), wanted_T, rtol=1e-5, atol=1e-5)

    found = FUNCTIONS["gae"](batch.with_field("token_rewards", Axis.TOKENS, rewards), context)
    values = [[token[1] for token in row] for row in rows]
    advantages = [loop(r, v, gamma, lam) for r, v in zip(expected, values, strict=True)]
    wanted_T = torch.tensor([a for row in advantages for a in row], dtype=torch.float64)
    torch.testing.assert_close(found["advantages"].values.double(), wanted_T, rtol=1e-4, atol=1e-4)
    returns_T = wanted_T + torch.tensor([v for row in values for v in row], dtype=torch.float64)
    torch.testing.assert_close(found["returns"].values.double(), returns_T, rtol=1e-4, atol=1e-4)


def test_scores_stand_in_the_place_of_the_outcome_or_beside_it():
    rows = [[(0.5, 0, 0, 0), (-1.0, 0, 0, 0)], [], [(2.0, 0, 0, 0)]]
    batch = batch_of(rows, [4.0, 9.0, -3.0])
    tokens, context = FUNCTIONS["token_rewards"], FunctionContext()
    assert tokens(batch, context)["token_rewards"].values.tolist() == [0.5, -1.0, 2.0]
    both = tokens(batch, context, add_rewards=True)["token_rewards"]
    assert both.values.tolist() == [0.5, 3.0, -1.0]
    alone = batch.select(["rewards", "responses"])
    assert tokens(alone, context)["token_rewards"].values.tolist() == [0, 4.0, -3.0]
    whitened = FunctionContext(gae=GaeSettings(whiten_rewards=True))
    scaled = tokens(batch.select(["token_scores", "responses"]), whitened)["token_rewards"]
    assert statistics.stdev(scaled.values.tolist()) == pytest.approx(1, rel=1e-5)
