"""From a recipe and the live values to what workers are told. No worker is called here."""

from __future__ import annotations

import secrets
from typing import Any

import torch

from hybridflow.algorithms.losses.preference import PreferenceSettings
from hybridflow.dataflow.state import SharedState
from hybridflow.megatron.config import (
    CorrectionSettings,
    EngineConfig,
    LossSettings,
    OptimizerSettings,
    ValueLossSettings,
)
from hybridflow.recipe import catalogue
from hybridflow.recipe.catalogue_losses import PUBLISHED_CLIP
from hybridflow.recipe.graph import Node
from hybridflow.recipe.plan import ACTOR, WARM_START, Plan, Stage
from hybridflow.recipe.schema import Recipe
from hybridflow.recipe.schema_algorithm import AlgorithmSection, SapoSection
from hybridflow.rollout.launch import ServerConfig
from hybridflow.rollout.protocol import Sampling


def sampling(state: SharedState, temperature: float, seed: int) -> Sampling:
    """The live sampling settings at a temperature and seed."""
    return Sampling(
        max_tokens=int(state["max_tokens"]),
        temperature=temperature,
        top_p=state["top_p"],
        top_k=int(state["top_k"]),
        seed=seed,
    )


def temperature(state: SharedState, stage: Stage, node: Node) -> float:
    """Of a node's responses: the sampler's, and 1 for those that the data bring."""
    return state["temperature"] if stage.graph.is_sampled(node.inputs["responses"]) else 1.0


def value_loss_settings(
    algorithm: AlgorithmSection, state: SharedState, stage: Stage, role: str, name: str
) -> ValueLossSettings:
    """How a critic turns a batch of ``stage`` into optimizer steps."""
    return ValueLossSettings(
        name=name,
        clip=algorithm.value_clip or ValueLossSettings.clip,
        aggregation=algorithm.value_aggregation,
        **_passes(state, stage, role),
    )


def _passes(state: SharedState, stage: Stage, role: str) -> dict[str, Any]:
    """How often ``role`` passes over a batch and, beside the recipe's, at what rate."""
    training = stage.trained.get(role)
    if training is None:  # it is looked at, not trained
        return {}
    return {
        "mini_batches": training.mini_batches,
        "epochs": training.epochs,
        "lr_scale": state[f"{role}_lr"] / training.optimizer.lr,
    }


def loss_settings(
    algorithm: AlgorithmSection,
    state: SharedState,
    stage: Stage,
    node: Node,
    version: int | None,
) -> LossSettings:
    """How a policy's node of ``stage`` turns a batch into a loss, and that into optimizer steps;
    ``version`` is that of the servers' weights, None where nothing is sampled."""
    role, name = str(node.role), node.options["loss"]
    entry = catalogue.LOSSES.get(name)
    low, high = algorithm.clip_bounds(PUBLISHED_CLIP if entry is None else entry.clip)
    gate = algorithm.sapo or SapoSection()
    of_samples = stage.generates and entry is not None and "advantages" in entry.needs
    return LossSettings(
        name=name,
        clip_low=low,
        clip_high=high,
        dual_clip=algorithm.dual_clip or LossSettings.dual_clip,
        tau_positive=gate.tau_positive,
        tau_negative=gate.tau_negative,
        kl_coef=state["kl_coef"] if _pays_kl(algorithm, stage, role) else 0.0,
        kl_estimator=algorithm.kl.estimator,
        **(_corrections(algorithm, state) if of_samples else {}),
        preference=PreferenceSettings(**algorithm.preference.model_dump()),
        **_average(algorithm, stage),
        temperature=temperature(state, stage, node),
        **_passes(state, stage, role),
        agreement_threshold=algorithm.agreement.threshold,
        agreement_bound=algorithm.agreement.bound if of_samples else None,
        weight_version=version,
    )


def _pays_kl(algorithm: AlgorithmSection, stage: Stage, role: str) -> bool:
    """Whether a KL is a term of the role's loss in the stage: a warm start reads no reference."""
    updates = [n for n in stage.graph.nodes if n.role == role and n.call == "update"]
    given = {name for node in updates for name in node.inputs}
    return algorithm.kl.place == "loss" and bool(given & {"ref_logprobs", "ref_hidden"})


def _average(algorithm: AlgorithmSection, stage: Stage) -> dict[str, Any]:
    """How the losses of tokens become one number: a warm start's is the mean, whatever the
    algorithm behind it takes."""
    if stage.name == WARM_START:
        return {}
    return {
        "aggregation": algorithm.aggregation,
        "loss_divisor": algorithm.loss_divisor or LossSettings.loss_divisor,
    }


def _corrections(algorithm: AlgorithmSection, state: SharedState) -> dict[str, Any]:
    """Settings of losses with advantages: a supervised loss, or that of a model which learns from
    outcomes beside the policy, has no use for them."""
    told, mask = algorithm.rollout_correction, algorithm.off_policy_mask
    correction = told and CorrectionSettings(
        told.method, told.level, low=told.low or 1 / told.high, high=told.high
    )
    return {
        "entropy_coef": state["entropy_coef"],
        "measure_entropy": algorithm.entropy,
        "correction": correction,
        "off_policy_bound": mask and mask.bound,
    }


def optimizer_settings(plan: Plan, stage: Stage, role: str) -> OptimizerSettings | None:
    """The role's optimizer in the stage or, where it does not train then, in the next one that
    trains it, with the number of its optimizer steps; None for a role that never trains."""
    training = plan.training(stage, role)
    if training is None:
        return None
    section = training.optimizer
    return OptimizerSettings(
        lr=section.lr,
        betas=(section.betas[0], section.betas[1]),
        eps=section.eps,
        weight_decay=section.weight_decay,
        clip_grad=section.clip_grad,
        schedule=section.schedule,
        warmup_steps=section.warmup_steps,
        min_lr=section.min_lr,
        total_steps=plan.scheduled_steps(stage, role),
    )


def engine_config(plan: Plan, role: str, kind: str, stage: Stage) -> EngineConfig:
    """Of a model's ranks when the run begins with ``stage``."""
    recipe = plan.recipe
    return EngineConfig(
        model_path=recipe.model_path(role),
        layout=plan.layouts[role],
        dtype=getattr(torch, recipe.model.dtype),
        seed=recipe.seed,
        optimizer=optimizer_settings(plan, stage, role),
        micro_batch_tokens=recipe.roles.models()[role].micro_batch_tokens,
        head="value" if kind == "value" else "vocabulary",
        keep_reference_head=role == ACTOR and recipe.algorithm.kl.estimator == "full",
    )


def server_config(recipe: Recipe) -> ServerConfig:
    """Of every rollout server."""
    section = recipe.roles.servers
    return ServerConfig(
        engine=section.engine,
        model_path=recipe.model.path,
        dtype=recipe.model.dtype,
        tp=section.parallel.tp,
        ep=section.parallel.ep,
        threads=section.threads,
        max_running_requests=section.max_running_requests,
        prefix_cache=section.sync.pause != "in_place",
        start_timeout=section.start_timeout_seconds,
        request_timeout=section.request_timeout_seconds,
        python=section.python,
        token=secrets.token_hex(32),  # of this run: other users of the hosts reach 127.0.0.1 too
    )
