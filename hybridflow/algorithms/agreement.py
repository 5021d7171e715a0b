"""How far the rollout engine and the trainer agree on the tokens that were sampled.

Both give the log-probability of the same tokens under the same weights, computed by other
kernels in another order of sums. In float32 they differ by some 1e-6; a difference that is far
larger means that the two compute different models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.kl import kl_divergence
from hybridflow.batch import Ragged


class Disagreement(RuntimeError):
    """A token's log-probability differs by more than the stated bound."""


@dataclass(frozen=True)
class TokenGap:
    """One token's log-probabilities in nats; ``token`` counts from the response's start."""

    sample: int
    token: int
    rollout: float
    trainer: float

    @property
    def gap(self) -> float:
        """Absolute difference; infinite where it is not a number."""
        gap = abs(self.rollout - self.trainer)
        return math.inf if math.isnan(gap) else gap


@dataclass(frozen=True)
class Agreement:
    """Over ``tokens`` compared tokens.

    Attributes:
        mean, max: of the absolute difference, in nats.
        kl: KL(rollout || trainer) in nats a token, by the k3 estimator.
        share: of tokens whose absolute difference is over the threshold.
        worst: the token of the largest difference; None without tokens.
    """

    tokens: int
    mean: float
    max: float
    kl: float
    share: float
    worst: TokenGap | None


def gap_values(rollout_T: Tensor, trainer_T: Tensor, threshold: float) -> dict[str, Tensor]:
    """``[T]`` values of each token by metric; their means are the metrics.

    ``rollout_gap_mean`` is the absolute difference, infinite where it is not a number.
    ``rollout_kl`` estimates KL(rollout || trainer): the tokens were sampled by the rollout, so its
    log-probability is the first (http://joschu.net/blog/kl-approx.html, k3).
    ``rollout_gap_share`` is 1 where the difference is over ``threshold``.
    """
    gap_T = (trainer_T - rollout_T).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return {
        "rollout_gap_mean": gap_T,
        # Of differences of 1e-6 float32 would leave rounding alone.
        "rollout_kl": kl_divergence(rollout_T.double(), trainer_T.double(), "k3"),
        "rollout_gap_share": (gap_T > threshold).to(gap_T.dtype),
    }


def compare(
    rollout: Ragged, trainer: Ragged, threshold: float, compared_T: Tensor | None = None
) -> Agreement:
    """Agreement over the response tokens of ``rollout`` and ``trainer``, which have equal rows.

    Args:
        compared_T: ``[T]`` bool, the tokens to compare: those that were sampled from the very
            weights that the trainer has. None: all.
    """
    assert torch.equal(rollout.offsets, trainer.offsets), "log-probabilities of other responses"
    if compared_T is None:
        compared_T = torch.ones(len(rollout.values), dtype=torch.bool)
    tokens = int(compared_T.sum())
    values = gap_values(rollout.values[compared_T], trainer.values[compared_T], threshold)
    means = [float(v.double().mean()) if tokens else 0.0 for v in values.values()]
    worst = worst_token(rollout, trainer.values, compared_T)
    return Agreement(tokens, means[0], worst.gap if worst else 0.0, means[1], means[2], worst)


def worst_token(rollout: Ragged, trainer_T: Tensor, compared_T: Tensor) -> TokenGap | None:
    """The compared token that differs most; None when no token is compared."""
    places = torch.nonzero(compared_T).flatten()
    if not len(places):
        return None
    rollout_T = rollout.values[places]
    gap_T = (trainer_T[places] - rollout_T).abs()
    place = int(places[int(gap_T.argmax())])  # what is not a number counts as the largest
    sample = int(torch.searchsorted(rollout.offsets, place, right=True)) - 1
    token = place - int(rollout.offsets[sample])
    return TokenGap(sample, token, float(rollout.values[place]), float(trainer_T[place]))


def check(worst: TokenGap | None, bound: float) -> None:
    """Disagreement, naming sample and token, when ``worst`` differs by more than ``bound``."""
    if worst is None or worst.gap <= bound:
        return
    raise Disagreement(
        f"sample {worst.sample}, token {worst.token} of the response: the rollout's "
        f"log-probability is {worst.rollout:.7g}, the trainer's {worst.trainer:.7g}; they differ "
        f"by {worst.gap:.3g}, over algorithm.agreement.bound {bound:g}. The servers compute "
        "another model than the trainer, or hold other weights."
    )


def check_old(mean: float, bound: float) -> None:
    """Disagreement when the old policy is not the trainer's own before its first step.

    Args:
        mean: of the absolute difference of the log-probabilities, in nats.
    """
    if mean <= bound:
        return
    raise Disagreement(
        f"'old_logprobs' differ from the actor's own by {mean:.3g} nats a token before the first "
        f"optimizer step, over {bound:g} (algorithm.agreement.old_bound): the ratio is not 1 on "
        "the data that was just sampled. They must come from the actor's `logprobs`, after its "
        "last update and at the same temperature; a model that answers at random (dropout) cannot "
        "be compared at all."
    )
