"""Losses of whole responses: which of two is the better one, or whether one is desirable.

``beta`` is the papers' temperature. What a response earns is its implicit reward: beta times its
log-probability over the reference's, or times its log-probability where there is no reference.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch import Tensor


@dataclass(frozen=True)
class PreferenceSettings:
    """See the losses that read each.

    Attributes:
        beta: temperature of the implicit reward.
        label_smoothing: share of pairs that are taken to be the wrong way round; ``dpo`` alone.
        by_length: of ``ipo``, whether log-probabilities are divided by their response's length.
        target_margin: of ``simpo``, by which the chosen response should win.
        odds_weight: of ``orpo``, of its odds ratio beside the likelihood.
        desirable_weight, undesirable_weight: of ``kto``.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    by_length: bool = True
    target_margin: float = 0.5
    odds_weight: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass(frozen=True)
class Responses:
    """S whole responses; of pairs the chosen one is followed by the rejected one.

    Attributes:
        logprobs_S: log-probability of each, the sum over its tokens, in nats.
        lengths_S: tokens of each.
        ref_logprobs_S: the same under the reference.
        labels_S: bool, whether each is desirable.
        kl_baseline: of ``kto``: of the whole step, in nats.
    """

    logprobs_S: Tensor
    lengths_S: Tensor
    ref_logprobs_S: Tensor | None = None
    labels_S: Tensor | None = None
    kl_baseline: float | None = None

    @property
    def log_ratios_S(self) -> Tensor:
        """``[S]`` log-probability of each over the reference's."""
        assert self.ref_logprobs_S is not None, "check_fields looks"
        return self.logprobs_S - self.ref_logprobs_S

    @property
    def means_S(self) -> Tensor:
        """``[S]`` mean log-probability of a token."""
        return self.logprobs_S / self.lengths_S


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss of every pair or response (N), and what is worth a metric.

    Attributes:
        loss_N: ``[N]``, differentiable.
        metrics: name -> detached values, whose mean is reported.
    """

    loss_N: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def dpo(responses: Responses, settings: PreferenceSettings) -> PreferenceLoss:
    """Direct preference optimisation.

    Rafailov et al., 2023 (arXiv:2305.18290), equation 7, with the conservative form of its
    authors' note for labels that are wrong with probability ``e = label_smoothing``::

        h    = log(pi(y_w) / ref(y_w)) - log(pi(y_l) / ref(y_l))
        loss = -(1 - e) * log sigmoid(beta * h) - e * log sigmoid(-beta * h)
    """
    rewards_S = settings.beta * responses.log_ratios_S
    margin_N = _margins(rewards_S)
    share = settings.label_smoothing
    right_N, wrong_N = functional.logsigmoid(margin_N), functional.logsigmoid(-margin_N)
    return of_pairs(-(1 - share) * right_N - share * wrong_N, rewards_S)


def ipo(responses: Responses, settings: PreferenceSettings) -> PreferenceLoss:
    """Identity preference optimisation.

    Azar et al., 2023 (arXiv:2310.12036), equation 17, its ``tau`` being ``beta``::

        loss = (h - 1 / (2 * beta))^2

    where h is that of ``dpo``; with ``by_length`` its log-probabilities are divided by their
    response's length: the form in which the paper's results are, as its authors told those of TRL.
    """
    ratios_S = responses.log_ratios_S
    if settings.by_length:
        ratios_S = ratios_S / responses.lengths_S
    loss_N = (_margins(ratios_S) - 1 / (2 * settings.beta)) ** 2
    return of_pairs(loss_N, settings.beta * responses.log_ratios_S)


def orpo(responses: Responses, settings: PreferenceSettings) -> PreferenceLoss:
    """Odds ratio preference optimisation: likelihood and preference in one, without a reference.

    Hong et al., 2024 (arXiv:2403.07691), equations 6 and 7. With ``P(y)`` the geometric mean of a
    response's token probabilities (equation 3) and ``odds(y) = P(y) / (1 - P(y))``::

        loss = -log P(y_w) - odds_weight * log sigmoid(log odds(y_w) - log odds(y_l))

    Metrics: the likelihood's part is ``nll``, ``log_odds`` is what stands in the sigmoid.
    """
    means_S = responses.means_S
    log_odds_N = _margins(means_S - _log1m_exp(means_S))
    nll_N = -means_S.view(-1, 2)[:, 0]
    loss_N = nll_N - settings.odds_weight * functional.logsigmoid(log_odds_N)
    found = of_pairs(loss_N, settings.odds_weight * means_S)
    parts = {"nll": nll_N.detach(), "log_odds": log_odds_N.detach()}
    return PreferenceLoss(loss_N, found.metrics | parts)


def simpo(responses: Responses, settings: PreferenceSettings) -> PreferenceLoss:
    """Simple preference optimisation: mean log-probabilities as rewards, without a reference.

    Meng et al., 2024 (arXiv:2405.14734), equation 6, its ``gamma`` being ``target_margin``::

        loss = -log sigmoid(beta / |y_w| * log pi(y_w) - beta / |y_l| * log pi(y_l) - gamma)
    """
    rewards_S = settings.beta * responses.means_S
    loss_N = -functional.logsigmoid(_margins(rewards_S) - settings.target_margin)
    return of_pairs(loss_N, rewards_S)


def kto(responses: Responses, settings: PreferenceSettings) -> PreferenceLoss:
    """Kahneman-Tversky optimisation: single responses, desirable or not.

    Ethayarajh et al., 2024 (arXiv:2402.01306), equation 8. With ``r = log(pi(y) / ref(y))`` and
    the baseline ``z`` of the whole step, which carries no gradient::

        loss = desirable_weight   * (1 - sigmoid(beta * (r - z)))   where y is desirable
               undesirable_weight * (1 - sigmoid(beta * (z - r)))   elsewhere

    Metrics: ``desirable_reward`` and ``undesirable_reward``, ``beta * r`` of each kind;
    ``reward_accuracy``, the share of responses that are on their side of the baseline.
    """
    assert responses.labels_S is not None and responses.kl_baseline is not None, "check_fields"
    rewards_S = settings.beta * responses.log_ratios_S
    above_S = rewards_S - settings.beta * responses.kl_baseline
    label_S = responses.labels_S
    signed_S = torch.where(label_S, above_S, -above_S)
    weight_S = torch.full_like(above_S, settings.undesirable_weight)
    weight_S = weight_S.masked_fill(label_S, settings.desirable_weight)
    rewards_S = rewards_S.detach()
    metrics = {
        "desirable_reward": rewards_S[label_S],
        "undesirable_reward": rewards_S[~label_S],
        "reward_accuracy": (signed_S.detach() > 0).float(),
        "kl_baseline": torch.full_like(rewards_S, responses.kl_baseline),
    }
    return PreferenceLoss(weight_S * torch.sigmoid(-signed_S), metrics)


def prime(responses: Responses, settings: PreferenceSettings) -> PreferenceLoss:
    """Cross entropy of an implicit process reward model with the outcome.

    Cui et al., 2025 (arXiv:2502.01456), equation 4; Yuan et al., 2024 (arXiv:2412.01981). A
    response earns ``r = beta * log(prm(y) / ref(y))``, the sum of its tokens' rewards::

        loss = -log sigmoid(r)   where the outcome is good
               -log sigmoid(-r)  elsewhere

    Metrics: ``outcome_accuracy``, the share of outcomes that the sign of r tells;
    ``good_reward`` and ``bad_reward``, r of each kind.
    """
    assert responses.labels_S is not None, "check_fields looks"
    rewards_S, label_S = settings.beta * responses.log_ratios_S, responses.labels_S
    loss_S = -functional.logsigmoid(torch.where(label_S, rewards_S, -rewards_S))
    rewards_S = rewards_S.detach()
    metrics = {
        "outcome_accuracy": ((rewards_S > 0) == label_S).float(),
        "good_reward": rewards_S[label_S],
        "bad_reward": rewards_S[~label_S],
    }
    return PreferenceLoss(loss_S, metrics)


def _margins(values_S: Tensor) -> Tensor:
    """``[S / 2]`` the chosen response's value over the rejected one's."""
    chosen_N, rejected_N = values_S.view(-1, 2).unbind(1)
    return chosen_N - rejected_N


def of_pairs(loss_N: Tensor, rewards_S: Tensor) -> PreferenceLoss:
    """With the metrics of every loss of pairs."""
    chosen_N, rejected_N = rewards_S.detach().view(-1, 2).unbind(1)
    metrics = {
        "reward_chosen": chosen_N,
        "reward_rejected": rejected_N,
        "reward_margin": chosen_N - rejected_N,
        "reward_accuracy": (chosen_N > rejected_N).float(),
    }
    return PreferenceLoss(loss_N, metrics)


def _log1m_exp(values: Tensor) -> Tensor:
    """``log(1 - exp(x))`` of x < 0, exact at both ends; from -1e-7 up as at -1e-7."""
    values = values.clamp(max=-1e-7)
    near = values > -math.log(2)
    close = torch.log(-torch.expm1(torch.where(near, values, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near, -1.0, values)))
    return torch.where(near, close, far)


@dataclass(frozen=True)
class Preference:
    """An entry of the registry.

    Attributes:
        pairs: whether responses come in pairs; else each has a label.
        needs: fields of the batch, beside prompts and responses.
        metrics: names of its metrics.
        kinds: the metrics of good and of bad responses, where these are not pairs: by how much
            their means differ is the metric ``reward_margin``.
    """

    function: Callable[[Responses, PreferenceSettings], PreferenceLoss]
    pairs: bool
    needs: tuple[str, ...]
    metrics: tuple[str, ...]
    kinds: tuple[str, str] | None = None

    def __call__(self, responses: Responses, settings: PreferenceSettings) -> PreferenceLoss:
        return self.function(responses, settings)


_PAIRS = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
_REFERENCE = ("ref_logprobs",)
_OUTCOMES = ("good_reward", "bad_reward")
_LABELS = ("desirable_reward", "undesirable_reward")
_PRIME = ("outcome_accuracy", *_OUTCOMES)
_KTO = (*_LABELS, "reward_accuracy", "kl_baseline")

PREFERENCES: dict[str, Preference] = {
    "dpo": Preference(dpo, True, _REFERENCE, _PAIRS),
    "ipo": Preference(ipo, True, _REFERENCE, _PAIRS),
    "orpo": Preference(orpo, True, (), (*_PAIRS, "nll", "log_odds")),
    "simpo": Preference(simpo, True, (), _PAIRS),
    "prime": Preference(prime, False, (*_REFERENCE, "labels"), _PRIME, _OUTCOMES),
    "kto": Preference(kto, False, (*_REFERENCE, "labels", "kl_baseline"), _KTO, _LABELS),
}
