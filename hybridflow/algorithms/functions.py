"""The functions that a graph may name: batches in and out, the maths from its leaf file.

Each entry is ``function(batch, context, **options) -> {output: data}``. ``batch`` holds the inputs
under the signature's parameter names; the outputs' axes are the signature's too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybridflow.algorithms import advantages, rewards_math
from hybridflow.algorithms.lagrangian import combined_advantages
from hybridflow.batch import Batch
from hybridflow.recipe import catalogue
from hybridflow.recipe.registry import Registry


@dataclass(frozen=True)
class GaeSettings:
    """See ``advantages.gae``; ``whiten_rewards`` is that of ``advantages.token_rewards``."""

    gamma: float = 1.0
    lam: float = 0.95
    whiten_rewards: bool = False
    whiten_advantages: bool = True


@dataclass(frozen=True)
class FunctionContext:
    """What a function may know beside its inputs.

    Attributes:
        step: of the stage, counted from 0.
        seed: of the run.
        normalize_by_std: whether group-relative advantages are divided by the group's std.
        prompts_per_step: prompts that a step trains on.
        max_tokens: most tokens of a response.
        preference_beta: temperature of implicit rewards.
        previous: the node's own outputs of the round before, within a ``repeat_until`` of this
            step; None in the first round and outside of one.
        kl_coef: weight of the KL in every token's reward; 0 where the KL is a term of the loss.
        kl_estimator: of that KL.
        gae: of functions over a critic's values.
        multiplier: weight of costs in this step, the Lagrange multiplier lambda.
    """

    step: int = 0
    seed: int = 0
    normalize_by_std: bool = True
    prompts_per_step: int = 0
    kl_coef: float = 0.0
    max_tokens: int = 0
    preference_beta: float = 0.1
    previous: Mapping[str, Any] | None = None
    kl_estimator: str = "k3"
    gae: GaeSettings = GaeSettings()
    multiplier: float = 0.0


Function = Callable[..., dict[str, Any]]


def group_relative(batch: Batch, context: FunctionContext) -> dict[str, Any]:
    """rewards (samples) -> advantages (samples)."""
    advantages_PG = advantages.group_relative(
        _per_prompt(batch, "rewards"), context.normalize_by_std
    )
    return {"advantages": advantages_PG.flatten()}


def rloo(batch: Batch, context: FunctionContext) -> dict[str, Any]:
    """rewards (samples) -> advantages (samples)."""
    advantages_PG = advantages.leave_one_out(_per_prompt(batch, "rewards"))
    return {"advantages": advantages_PG.flatten()}


def remax(batch: Batch, context: FunctionContext) -> dict[str, Any]:
    """rewards (samples), baseline (prompts) -> advantages (samples)."""
    advantages_PG = advantages.minus_baseline(_per_prompt(batch, "rewards"), batch["baseline"])
    return {"advantages": advantages_PG.flatten()}


def opo(batch: Batch, context: FunctionContext) -> dict[str, Any]:
    """rewards (samples), responses -> advantages (samples)."""
    rewards_PG = _per_prompt(batch, "rewards")
    lengths_PG = batch["responses"].lengths.view_as(rewards_PG)
    return {"advantages": advantages.optimal_baseline(rewards_PG, lengths_PG).flatten()}


def gpg(batch: Batch, context: FunctionContext) -> dict[str, Any]:
    """rewards (samples) -> advantages (samples)."""
    advantages_PG = advantages.group_policy_gradient(_per_prompt(batch, "rewards"))
    return {"advantages": advantages_PG.flatten()}


def gdpo(
    batch: Batch, context: FunctionContext, weights: Sequence[float] | None = None
) -> dict[str, Any]:
    """first, second and perhaps third, fourth (samples) -> advantages (samples)."""
    rewards_KPG = [_per_prompt(batch, name) for name in GDPO_REWARDS if name in batch]
    return {"advantages": advantages.decoupled_rewards(rewards_KPG, weights).flatten()}


GDPO_REWARDS = ("first", "second", "third", "fourth")


def reinforce_pp(batch: Batch, context: FunctionContext, gamma: float = 1.0) -> dict[str, Any]:
    """rewards (samples), responses, perhaps logprobs, ref_logprobs -> advantages (tokens)."""
    kl = {name: batch[name] for name in ("logprobs", "ref_logprobs") if name in batch}
    found = advantages.reinforce_pp(
        batch["rewards"],
        batch["responses"],
        gamma,
        context.kl_coef,
        context.kl_estimator,
        **kl,
    )
    return {"advantages": found}


def reinforce_pp_baseline(batch: Batch, context: FunctionContext) -> dict[str, Any]:
    """rewards (samples), responses -> advantages (samples)."""
    rewards_PG = _per_prompt(batch, "rewards")
    lengths_PG = batch["responses"].lengths.view_as(rewards_PG)
    return {"advantages": advantages.reinforce_pp_baseline(rewards_PG, lengths_PG).flatten()}


def token_rewards(
    batch: Batch, context: FunctionContext, kl_share: float = 1.0, add_rewards: bool = False
) -> dict[str, Any]:
    """rewards (samples) or token_scores (tokens), responses, perhaps logprobs, ref_logprobs ->
    token_rewards (tokens)."""
    kl = {name: batch[name] for name in ("logprobs", "ref_logprobs") if name in batch}
    scores = batch.fields.get("token_scores")
    found = advantages.token_rewards(
        batch["rewards"] if scores is None or add_rewards else None,
        batch["responses"],
        context.kl_coef * kl_share,
        context.kl_estimator,
        scores=scores,
        whitened=context.gae.whiten_rewards,
        **kl,
    )
    return {"token_rewards": found}


def gae(batch: Batch, context: FunctionContext, whiten: bool | None = None) -> dict[str, Any]:
    """token_rewards, values (tokens) -> advantages, returns (tokens)."""
    settings = context.gae
    whitened = settings.whiten_advantages if whiten is None else whiten
    advantages_, returns = advantages.gae(
        batch["token_rewards"], batch["values"], settings.gamma, settings.lam, whitened=whitened
    )
    return {"advantages": advantages_, "returns": returns}


def prime(batch: Batch, context: FunctionContext, gamma: float = 1.0) -> dict[str, Any]:
    """rewards (samples), prm_logprobs, ref_logprobs (tokens) -> advantages (tokens)."""
    found = advantages.implicit_process(
        _per_prompt(batch, "rewards"),
        batch["prm_logprobs"],
        batch["ref_logprobs"],
        context.preference_beta,
        gamma,
    )
    return {"advantages": found}


def outcome_labels(batch: Batch, context: FunctionContext, above: float = 0.5) -> dict[str, Any]:
    """rewards (samples) -> labels (samples, bool)."""
    return {"labels": batch["rewards"] > above}


def lagrangian(batch: Batch, context: FunctionContext) -> dict[str, Any]:
    """advantages, cost_advantages (tokens), costs (samples) -> combined (tokens)."""
    combined = combined_advantages(
        batch["advantages"],
        batch["cost_advantages"],
        context.multiplier,
        whitened=context.gae.whiten_advantages,
    )
    return {"combined": combined}


def shuffle(batch: Batch, context: FunctionContext, seed: int = 0) -> dict[str, Any]:
    """values (samples) -> shuffled (samples), by the node's and the run's seeds and the step."""
    mixed_seed = seed * 7_919 + context.seed
    return {"shuffled": rewards_math.shuffle(batch["values"], mixed_seed, context.step)}


def prompt_mean(batch: Batch, context: FunctionContext) -> dict[str, Any]:
    """values (samples) -> means (prompts)."""
    return {"means": _per_prompt(batch, "values").float().mean(dim=1)}


def weighted_sum(
    batch: Batch, context: FunctionContext, weights: Sequence[float] = (1.0, 1.0)
) -> dict[str, Any]:
    """first, second (samples) -> total (samples)."""
    return {"total": rewards_math.weighted_sum([batch["first"], batch["second"]], weights)}


def soft_overlong(
    batch: Batch, context: FunctionContext, buffer: int | None = None, factor: float = 1.0
) -> dict[str, Any]:
    """rewards (samples), responses -> shaped (samples)."""
    longest = context.max_tokens
    # The paper's share: 4,096 of 20,480 tokens.
    buffer = max(1, longest // 5) if buffer is None else buffer
    penalty_S = rewards_math.soft_overlong(batch["responses"].lengths, longest, buffer, factor)
    return {"shaped": batch["rewards"].float() + penalty_S}


def rotate_responses(batch: Batch, context: FunctionContext) -> dict[str, Any]:
    """responses, response_mask (tokens) -> rotated, rotated_mask (tokens): each prompt's responses
    go to the next prompt."""
    if batch.prompts < 2:
        raise ValueError(
            "rotate_responses needs two prompts a step or more; raise prompts_per_step"
        )
    names = {"responses": "rotated", "response_mask": "rotated_mask"}
    given = batch.select([name for name in names if name in batch])
    last, others = given.take([batch.prompts - 1]), given.slice(0, batch.prompts - 1)
    rotated = Batch.concat([last, others])
    return {names[name]: rotated[name] for name in rotated.fields}


def reverse_kl(batch: Batch, context: FunctionContext, scale: float = 1.0) -> dict[str, Any]:
    """logprobs, teacher_logprobs (tokens) -> advantages (tokens)."""
    student, teacher = batch["logprobs"], batch["teacher_logprobs"]
    gap_T = rewards_math.log_ratio(teacher.values, student.values)
    return {"advantages": student.with_values(scale * gap_T)}


def kto_baseline(batch: Batch, context: FunctionContext) -> dict[str, Any]:
    """logprobs, ref_logprobs, response_mask (tokens) -> kl_baseline (run)."""
    mask = batch.fields.get("response_mask")
    found = rewards_math.kl_baseline(batch["logprobs"], batch["ref_logprobs"], mask)
    return {"kl_baseline": found}


ACCUMULATED = (
    *("prompts", "responses", "rollout_logprobs", "rewards"),
    *("finished", "token_versions"),
)


def accumulate_signal(batch: Batch, context: FunctionContext) -> dict[str, Any]:
    """Adds this round's prompts whose rewards differ to those of the rounds before.

    The outputs, ``kept_<input>`` of each input that is there, form a batch of their own, of at
    most ``prompts_per_step`` prompts; ``enough`` tells whether that many are held.
    """
    held = [] if context.previous is None else [_held(context.previous, batch)]
    count = sum(part.prompts for part in held)
    chosen = rewards_math.signal_prompts(
        _per_prompt(batch, "rewards"), count, context.prompts_per_step
    )
    given = [name for name in ACCUMULATED if name in batch]
    kept = Batch.concat([*held, batch.select(given).take(chosen)])
    outputs = {f"kept_{name}": kept[name] for name in given}
    return {**outputs, "enough": kept.prompts >= context.prompts_per_step}


def _held(previous: Mapping[str, Any], like: Batch) -> Batch:
    fields = {name: previous[f"kept_{name}"] for name in ACCUMULATED if name in like}
    axes = {name: like.axes[name] for name in fields}
    return Batch(fields, axes, len(fields["prompts"]), like.samples_per_prompt)


def _per_prompt(batch: Batch, name: str) -> Tensor:
    """A samples field as ``[P, G]``."""
    return batch[name].reshape(batch.prompts, batch.samples_per_prompt)


_FUNCTIONS: dict[str, Function] = {
    "group_relative": group_relative,
    "rloo": rloo,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "gdpo": gdpo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "token_rewards": token_rewards,
    "gae": gae,
    "prime": prime,
    "outcome_labels": outcome_labels,
    "lagrangian": lagrangian,
    "shuffle": shuffle,
    "prompt_mean": prompt_mean,
    "weighted_sum": weighted_sum,
    "soft_overlong": soft_overlong,
    "accumulate_signal": accumulate_signal,
    "rotate_responses": rotate_responses,
    "kto_baseline": kto_baseline,
    "reverse_kl": reverse_kl,
}

FUNCTIONS = Registry("function", _FUNCTIONS, aliases=catalogue.FUNCTIONS.aliases)
