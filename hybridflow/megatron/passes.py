"""Passes over mini-batches: with an optimizer step for each, or without any."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridflow.megatron.config import LossSettings, ValueLossSettings
from hybridflow.megatron.lockstep import global_normalisers, in_lockstep
from hybridflow.megatron.optimizer import ModelOptimizer
from hybridflow.megatron.step import PackedModel, PackLoss
from megatron_bridge.layout import ParallelLayout

PassSettings = LossSettings | ValueLossSettings


def train(
    model: PackedModel,
    optimizer: ModelOptimizer,
    layout: ParallelLayout,
    parts: list[Any],
    measured: Any,
    loss: PassSettings,
) -> dict[str, float]:
    """``loss.epochs`` passes of an optimizer step per part; metrics, the same on every rank.

    Args:
        parts: mini-batches: ``Rows`` or the like, with ``packs`` and ``normaliser``.
        measured: gives the loss of packs of a part and reduces metrics, as ``UpdateLoss``.

    Raises:
        FloatingPointError: loss or gradient is not finite.
    """
    packings = in_lockstep([rows.packs for rows in parts], layout)
    parts = [replace(rows, packs=packs) for rows, packs in zip(parts, packings, strict=True)]
    normalisers = global_normalisers(parts)
    norms, rate = [], optimizer.rate(loss.lr_scale)
    for _ in range(loss.epochs):
        for rows, normaliser in zip(parts, normalisers, strict=True):
            if normaliser is None:  # a step without a gradient: momentum would move weights
                continue
            pack_loss = measured.of(rows, normaliser, first=not norms)
            check = None if norms else measured.check
            norm, rate = _step(model, optimizer, rows, loss, pack_loss, check)
            norms.append(norm)
    metrics = measured.reduce(parts)
    if not math.isfinite(metrics["loss"]):
        raise FloatingPointError(f"optimizer step {optimizer.steps}: the loss is {metrics['loss']}")
    return {
        **metrics,
        "grad_norm": sum(norms) / max(len(norms), 1),
        "lr": rate,
        "skipped_steps": loss.epochs * normalisers.count(None),
    }


def _step(
    model: PackedModel,
    optimizer: ModelOptimizer,
    rows: Any,
    loss: PassSettings,
    pack_loss: PackLoss,
    check: Callable[[], None] | None,
) -> tuple[float, float]:
    """One optimizer step, unless ``check`` raises; gradient norm and learning rate."""
    optimizer.zero_grad()
    model.forward_backward(rows.packs, loss.temperature, pack_loss)
    if check is not None:
        check()
    try:
        return optimizer.step(loss.lr_scale)
    except FloatingPointError as error:
        raise FloatingPointError(
            f"optimizer step {optimizer.steps}: {error}; no parameter has moved. Lower the "
            "learning rate, or look for NaN in the rewards and log-probabilities of this step's "
            "rollouts"
        ) from error


def look(
    model: PackedModel, layout: ParallelLayout, rows: Any, measured: Any, temperature: float
) -> dict[str, float]:
    """What ``measured`` finds of rows, of which a rank may have none; the same on every rank."""
    (packs,) = in_lockstep([rows.packs], layout)
    pack_loss = measured.of(replace(rows, packs=packs), 1.0, first=True)
    model.evaluate(packs, temperature, pack_loss)
    return measured.reduce([rows])
