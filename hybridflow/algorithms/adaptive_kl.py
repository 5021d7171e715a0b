"""The coefficient of the KL term, moved so that the KL itself stays near a target."""

_MOST_ERROR = 0.2


def adaptive_coefficient(
    coef: float, kl: float, target: float, horizon: float, samples: int
) -> float:
    """The coefficient for the next step.

    Ziegler et al., 2019 (arXiv:1909.08593), section 2.2, a proportional controller in the
    logarithm of the coefficient::

        e      = clip((kl - target) / target, -0.2, 0.2)
        coef'  = coef * (1 + K * e),   K = samples / horizon

    The paper's ``K = 0.1`` is a horizon of ten steps' samples.

    Args:
        kl: measured in this step, in nats a token, as ``target`` is.
        horizon: samples after which a steady error of 1 (were it not bounded) would have doubled
            the coefficient; at least a fifth of ``samples``, so that the sign stays.
        samples: of this step.
    """
    error = min(max(kl / target - 1, -_MOST_ERROR), _MOST_ERROR)
    return coef * (1 + error * samples / horizon)
