"""Losses of reward models: the better of two responses should have the higher score."""

import torch.nn.functional as functional
from torch import Tensor

from hybridflow.algorithms.losses.preference import PreferenceLoss, of_pairs


def bradley_terry(scores_S: Tensor, margins_N: Tensor | None = None) -> PreferenceLoss:
    """Negative log-likelihood of the chosen response under Bradley and Terry's model (1952).

    Ouyang et al., 2022 (arXiv:2203.02155), equation 1, with the margin of Llama 2 (Touvron et al.,
    2023, arXiv:2307.09288), equation 2::

        loss = -log sigmoid(r(y_w) - r(y_l) - m)

    Args:
        scores_S: ``[S]`` of S / 2 pairs: the chosen, then the rejected.
        margins_N: ``[S / 2]`` by how much each chosen response is better; None: 0.
    """
    chosen_N, rejected_N = scores_S.view(-1, 2).unbind(1)
    gap_N = chosen_N - rejected_N
    if margins_N is not None:
        gap_N = gap_N - margins_N
    return of_pairs(-functional.logsigmoid(gap_N), scores_S)


METRICS = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
SCORE_LOSSES = {"bradley_terry": False, "bradley_terry_token": True}
"""Names, and whether a response's score is the mean over its tokens, not that of its last one."""
