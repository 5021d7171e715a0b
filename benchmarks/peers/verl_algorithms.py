"""verl's side of benchmarks/algorithms.py: its functions of the same name, on padded tensors.

Runs in its own environment, beside the same torch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_value_loss,
    get_adv_estimator_fn,
    get_policy_loss_fn,
)
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

from benchmarks.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    GAMMA,
    GROUP,
    LAMBDA,
    LOSSES,
    MAX_TOKENS,
    SAMPLES,
    VALUE_CLIP,
    print_side,
    sizes_of,
)


class Plain:
    """verl's settings of advantages."""

    gamma = 1.0


def cases(shape: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every case by name."""
    torch.manual_seed(0)
    sizes = torch.tensor(sizes_of(shape))
    mask = (torch.arange(MAX_TOKENS) < sizes[:, None]).float()
    groups = np.repeat(np.arange(SAMPLES // GROUP), GROUP)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(SAMPLES), sizes - 1] = torch.rand(SAMPLES)
    baselines = torch.rand(SAMPLES // GROUP).repeat_interleave(GROUP)
    advantages = torch.randn(SAMPLES, 1) * mask
    logprobs = -1 - torch.rand(SAMPLES, MAX_TOKENS)
    old = logprobs + torch.rand(SAMPLES, MAX_TOKENS) - 0.5

    def advantage(name: str) -> Any:
        return get_adv_estimator_fn(name)(
            token_level_rewards=rewards,
            response_mask=mask,
            index=groups,
            config=Plain(),
            **({"reward_baselines": baselines} if name == "remax" else {}),
        )

    def loss(name: str, options: dict[str, Any]) -> Any:
        settings: dict[str, Any] = {"ppo_micro_batch_size_per_gpu": 1, "ppo_mini_batch_size": 1}
        config = ActorConfig(strategy="fsdp", rollout_n=1, **settings, **options)
        leaf = logprobs.clone().requires_grad_()
        value, metrics = get_policy_loss_fn(name)(
            old_log_prob=old,
            log_prob=leaf,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=config,
        )
        value.backward()
        return leaf.grad, metrics

    def value_loss() -> Any:
        leaf = logprobs.clone().requires_grad_()
        value, share = compute_value_loss(leaf, advantages, old, mask, VALUE_CLIP)
        value.backward()
        return leaf.grad, share.item()

    for ours, theirs in ADVANTAGES.items():
        yield f"advantage {ours}", lambda theirs=theirs: advantage(theirs)
    yield (
        "advantage gae",
        lambda: compute_gae_advantage_return(logprobs * mask, old * mask, mask, GAMMA, LAMBDA),
    )
    yield "loss value_clip", value_loss
    for ours, (theirs, options) in LOSSES.items():
        yield f"loss {ours}", lambda name=theirs, options=options: loss(name, options)
    for ours, (level, high) in CORRECTIONS.items():

        def corrected(level: str = level, high: float = high) -> Any:
            return compute_rollout_correction_weights(logprobs - old, mask, level, high)

        yield f"correction {ours}", corrected


if __name__ == "__main__":
    print_side(cases)
