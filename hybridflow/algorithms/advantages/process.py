"""Advantages from rewards of single tokens that a model of the process gives."""

from torch import Tensor

from hybridflow.algorithms.advantages.group import leave_one_out, require_groups
from hybridflow.algorithms.advantages.returns import discounted_sums
from hybridflow.algorithms.losses.base import Sequences
from hybridflow.batch import Ragged


def implicit_process(
    rewards_PG: Tensor,
    prm_logprobs: Ragged,
    ref_logprobs: Ragged,
    beta: float = 0.05,
    gamma: float = 1.0,
) -> Ragged:
    """Outcome and implicit process rewards, each less the mean of the prompt's others: PRIME.

    Cui et al., 2025 (arXiv:2502.01456), equations 3 and 5, the estimator of RLOO::

        r[i, t] = beta * (log prm(y[i, t]) - log ref(y[i, t]))
        m[i]    = mean over t of r[i, t]
        A[i, t] = sum over s >= t of gamma^(s - t) * (r[i, s] - mean over j != i of m[j])
                  + R[i] - mean over j != i of R[j]

    where j runs over the samples of i's prompt.

    Args:
        rewards_PG: ``[P, G]`` outcome rewards R, G at least 2.
        prm_logprobs, ref_logprobs: of every response token, in nats.

    Returns:
        One float32 advantage per response token.
    """
    require_groups(rewards_PG)
    sequences = Sequences.of(prm_logprobs)
    process_T = beta * (prm_logprobs.values.double() - ref_logprobs.values.double())
    means_PG = sequences.means(process_T).view_as(rewards_PG)
    others = rewards_PG.shape[1] - 1
    baseline_PG = (means_PG.sum(dim=1, keepdim=True) - means_PG) / others
    centred_T = process_T - sequences.spread(baseline_PG.flatten())
    returns_T = discounted_sums(centred_T, prm_logprobs, gamma)
    outcome_T = sequences.spread(leave_one_out(rewards_PG).flatten())
    return prm_logprobs.with_values((returns_T + outcome_T).float())
