"""How much better a sample was than its alternatives: one leaf file per family."""

from hybridflow.algorithms.advantages.gae import gae, token_rewards
from hybridflow.algorithms.advantages.group import (
    group_policy_gradient,
    group_relative,
    has_spread,
    leave_one_out,
    minus_baseline,
    optimal_baseline,
)
from hybridflow.algorithms.advantages.process import implicit_process
from hybridflow.algorithms.advantages.whitened import (
    decoupled_rewards,
    reinforce_pp,
    reinforce_pp_baseline,
    whiten,
)

__all__ = [
    "decoupled_rewards",
    "gae",
    "group_policy_gradient",
    "group_relative",
    "has_spread",
    "implicit_process",
    "leave_one_out",
    "minus_baseline",
    "optimal_baseline",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "token_rewards",
    "whiten",
]
