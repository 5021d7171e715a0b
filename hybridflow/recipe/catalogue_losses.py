"""The losses that an update may minimise. No torch."""

from dataclasses import dataclass

from hybridflow.recipe.registry import Registry

PUBLISHED_CLIP = (0.2, 0.2)
"""PPO's bounds (arXiv:1707.06347, section 6.1)."""


@dataclass(frozen=True)
class LossEntry:
    """A loss of the update call: the optional inputs that it needs or may use.

    Attributes:
        compares_policies: whether it reads ``old_logprobs``.
        whole_sequences: whether a response has one advantage, not one per token.
        settings: keys of the recipe's ``algorithm`` that it alone reads, or with few others.
        clip: bounds of its paper, where the recipe tells none.
        samples: responses of a prompt, for losses of whole responses; None for those of tokens.
    """

    description: str
    needs: tuple[str, ...] = ()
    compares_policies: bool = False
    whole_sequences: bool = False
    settings: tuple[str, ...] = ()
    samples: int | None = None
    clip: tuple[float, float] = PUBLISHED_CLIP


def _policy_loss(
    description: str,
    *settings: str,
    whole_sequences: bool = False,
    clip: tuple[float, float] = PUBLISHED_CLIP,
) -> LossEntry:
    return LossEntry(description, ("advantages",), True, whole_sequences, settings, clip=clip)


_LOSSES: dict[str, LossEntry] = {
    "ppo_clip": _policy_loss("PPO's clipped surrogate; bounds from algorithm.clip", "clip"),
    "dual_clip": _policy_loss(
        "PPO's, with a second bound for bad samples: algorithm.dual_clip times their advantage",
        *("clip", "dual_clip"),
    ),
    "gspo": _policy_loss(
        "PPO's on the ratio of whole responses; algorithm.clip is narrow: [3e-4, 4e-4]",
        "clip",
        whole_sequences=True,
        clip=(3e-4, 4e-4),
    ),
    "gspo_token": _policy_loss(
        "GSPO's ratio of whole responses with advantages that may differ by token",
        "clip",
        clip=(3e-4, 4e-4),
    ),
    "gmpo": _policy_loss(
        "geometric mean of a response's bounded ratios; algorithm.clip bounds their logarithms "
        "within [-low, high]: 0.4",
        "clip",
        whole_sequences=True,
        clip=(0.4, 0.4),
    ),
    "cispo": _policy_loss(
        "REINFORCE weighted by the ratio, bounded by algorithm.clip and without gradient",
        "clip",
        clip=(1.0, 0.2),
    ),
    "sapo": _policy_loss("a smooth gate of the ratio; temperatures from algorithm.sapo", "sapo"),
    "gpg": LossEntry("GPG's, the same as reinforce; for advantages of gpg", ("advantages",)),
    "reinforce": LossEntry("advantage times log-probability, no ratio", ("advantages",)),
    "cross_entropy": LossEntry("negative log-likelihood of the responses (supervised)"),
}


def _of_pairs(description: str, *settings: str, reference: bool = True) -> LossEntry:
    needs = ("ref_logprobs",) if reference else ()
    return LossEntry(description, needs, settings=settings, samples=2)


_PREFERENCES: dict[str, LossEntry] = {
    "dpo": _of_pairs(
        "DPO's, of pairs against a reference", "preference.beta", "preference.label_smoothing"
    ),
    "ipo": _of_pairs(
        "IPO's, of pairs against a reference", "preference.beta", "preference.by_length"
    ),
    "orpo": _of_pairs(
        "ORPO's: likelihood of the chosen response and odds over the rejected one",
        "preference.odds_weight",
        reference=False,
    ),
    "simpo": _of_pairs(
        "SimPO's: mean log-probabilities of pairs, with a margin",
        *("preference.beta", "preference.target_margin"),
        reference=False,
    ),
    "prime": LossEntry(
        "PRIME's, of a model whose token rewards are implicit: cross entropy with the outcome",
        ("ref_logprobs", "labels"),
        settings=("preference.beta",),
        samples=1,
    ),
    "kto": LossEntry(
        "KTO's, of single responses that are desirable or not",
        ("ref_logprobs", "labels", "kl_baseline"),
        settings=(
            *("preference.beta", "preference.desirable_weight"),
            "preference.undesirable_weight",
        ),
        samples=1,
    ),
}

LOSSES = Registry(
    "loss",
    _LOSSES,
    _PREFERENCES,
    aliases={"ppo": "ppo_clip", "geo_mean": "gmpo", "nll": "cross_entropy", "sft": "cross_entropy"},
)

EVALUATED = ("cross_entropy", *_PREFERENCES)
"""Losses of rows that are not trained on."""

VALUE_LOSSES = Registry(
    "value loss",
    {
        "value_clip": LossEntry(
            "half the squared error of the value or, where larger, of the value held within "
            "algorithm.value_clip of that before the update (PPO)",
            ("values", "returns"),
            settings=("value_clip", "value_aggregation"),
        ),
        "value_mse": LossEntry(
            "half the squared error of the value", ("returns",), settings=("value_aggregation",)
        ),
    },
)

SCORE_LOSSES: dict[str, LossEntry] = {
    "bradley_terry": LossEntry(
        "a reward model's on pairs: the value after a response's last token is its score",
        samples=2,
    ),
    "bradley_terry_token": LossEntry(
        "the same with the mean of the values after each of its tokens", samples=2
    ),
}
"""Losses of reward models."""

AGGREGATIONS = Registry(
    "aggregation",
    {
        "token_mean": "the mean over all tokens",
        "sequence_mean_token_mean": "the mean over responses of the mean over a response's tokens",
        "sequence_mean_token_sum": "the mean over responses of the sum over a response's tokens",
        "constant": "that, divided by algorithm.loss_divisor",
    },
    aliases={
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean_token_mean",
        "seq-mean-token-sum": "sequence_mean_token_sum",
        "seq-mean-token-sum-norm": "constant",
    },
)

KL_ESTIMATORS = Registry(
    "KL estimator",
    {
        "k1": "d, with d = logprobs - ref_logprobs of the sampled token",
        "k2": "d^2 / 2",
        "k3": "exp(-d) - 1 + d",
        "abs": "the absolute value of d",
        "full": "no estimate: the sum over the vocabulary",
    },
    aliases={"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
)
"""Ways to compute the KL from the reference at a token."""
