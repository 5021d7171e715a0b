"""Losses of one sampled token; how tokens are averaged is aggregation's matter."""

from hybridflow.algorithms.losses.base import (
    Loss,
    Sequences,
    TokenInputs,
    TokenLoss,
    by_token,
)
from hybridflow.algorithms.losses.clipped import cispo, dual_clip, ppo_clip, sapo
from hybridflow.algorithms.losses.plain import cross_entropy, reinforce
from hybridflow.algorithms.losses.sequence import gmpo, gspo, gspo_token
from hybridflow.recipe import catalogue
from hybridflow.recipe.registry import Registry

__all__ = ["LOSSES", "Loss", "Sequences", "TokenInputs", "TokenLoss"]

_CLIPPED = ("clip_fraction", "clip_fraction_low", "clip_fraction_high")
_RATIO = ("ratio_mean", *_CLIPPED, "entropy_estimate")
_PLAIN = ("entropy_estimate",)

_LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(by_token(ppo_clip), True, _RATIO, compares_policies=True),
    "dual_clip": Loss(
        by_token(dual_clip), True, (*_RATIO, "dual_clip_fraction"), compares_policies=True
    ),
    "gspo": Loss(gspo, True, _RATIO, compares_policies=True, whole_sequences=True),
    "gspo_token": Loss(gspo_token, True, _RATIO, compares_policies=True),
    "gmpo": Loss(gmpo, True, _RATIO, compares_policies=True, whole_sequences=True),
    "cispo": Loss(by_token(cispo), True, _RATIO, compares_policies=True),
    "sapo": Loss(by_token(sapo), True, ("ratio_mean", "entropy_estimate"), compares_policies=True),
    "gpg": Loss(reinforce, True, _PLAIN),
    "reinforce": Loss(reinforce, True, _PLAIN),
    "cross_entropy": Loss(cross_entropy, needs_advantages=False),
}

LOSSES = Registry("loss", _LOSSES, aliases=catalogue.LOSSES.aliases)
