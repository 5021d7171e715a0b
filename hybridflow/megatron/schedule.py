"""The learning rate at a step."""

import math

from hybridflow.megatron.config import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """Rate of optimizer step ``step``, counted from 0.

    Warm-up rises linearly and reaches ``lr`` at step ``warmup_steps``; then the rate stays, or
    falls to ``min_lr`` at ``total_steps`` (linearly, or along half a cosine) and remains there.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.lr
    falling_steps = settings.total_steps - settings.warmup_steps
    progress = min((step - settings.warmup_steps) / falling_steps, 1.0)
    if settings.schedule == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * share
