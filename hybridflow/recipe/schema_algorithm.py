"""The recipe's algorithm section: settings of losses and advantages."""

from typing import Annotated, Literal

from pydantic import Field

from hybridflow.recipe import catalogue_losses
from hybridflow.recipe.ranges import LARGEST, Clip, DualClip, NotNegative, Positive, named
from hybridflow.recipe.section import Section


class AdaptiveKlSection(Section):
    """A coefficient that moves until the measured KL is near a target."""

    target: Positive = Field(
        examples=[0.01], description="KL to hold, in nats a token, as `update/kl` measures it"
    )
    horizon: Positive = Field(
        examples=[10000],
        description="samples over which the coefficient answers: a step changes it by at most a "
        "fifth of its samples over this",
    )


class KlSection(Section):
    """The penalty for leaving the reference."""

    coef: NotNegative = Field(default=0.0, description="weight of the KL term in the loss")
    estimator: Annotated[
        Literal["k1", "k2", "k3", "abs", "full"], named(catalogue_losses.KL_ESTIMATORS)
    ] = Field(
        default="k3",
        description="estimator of the KL; `full`: no estimate, the sum over the vocabulary",
    )
    place: Literal["loss", "reward"] = Field(
        default="loss",
        description="a term of the actor's loss, or taken out of every token's reward (by a node "
        "of the functions token_rewards and reinforce_pp)",
    )
    adaptive: AdaptiveKlSection | None = Field(
        default=None, description="moves the coefficient, from `coef` on; null: it stays"
    )


class GaeSection(Section):
    """Generalised advantage estimation over a critic's values."""

    gamma: float = Field(default=1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(
        default=0.95, ge=0, le=1, description="lambda: 0 trusts the critic alone, 1 the rewards"
    )
    whiten_rewards: bool = Field(
        default=False,
        description="divide token rewards by their standard deviation over the step's batch",
    )
    whiten_advantages: bool = Field(
        default=True, description="mean 0 and deviation 1 over all response tokens of the batch"
    )


class LagrangianSection(Section):
    """Reward under a limit of cost (Safe RLHF): how lambda, the weight of costs, moves."""

    limit: float = Field(examples=[0.0], description="mean cost of a response that is allowed")
    start: Positive = Field(default=1.0, description="lambda in the first step")
    lr: Positive = Field(
        default=0.1, description="times lambda and the cost over the limit: change of ln lambda"
    )
    maximum: Positive = Field(default=10.0, description="largest lambda")


class AgreementSection(Section):
    """Rollout against trainer: log-probabilities of the same tokens under the same weights."""

    threshold: NotNegative = Field(
        default=0.01,
        description="difference in nats above which a token counts in `update/rollout_gap_share`",
    )
    bound: Positive | None = Field(
        default=None,
        description="largest difference in nats; beyond it the run ends with an error; null: any "
        "(in float32 on the CPU 1e-4 holds)",
    )
    old_bound: Positive | None = Field(
        default=None,
        description="largest mean difference in nats between `old_logprobs` that the actor gave in "
        "the same step and its own before its first optimizer step; beyond it the run ends with an "
        "error; null: 1e-3, in bfloat16 0.1",
    )


class SapoSection(Section):
    """Temperatures of the loss `sapo`: the larger, the sooner its gradient fades."""

    tau_positive: Positive = Field(default=1.0, description="where the advantage is positive")
    tau_negative: Positive = Field(default=1.05, description="where it is not")


class PreferenceSection(Section):
    """Losses of whole responses: `dpo`, `ipo`, `kto`, `orpo`, `simpo`, `prime`."""

    beta: Positive = Field(default=0.1, description="temperature of the implicit reward")
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="of `dpo`: share of pairs that are the wrong way round",
    )
    by_length: bool = Field(
        default=True,
        description="of `ipo`: log-probabilities are divided by their response's length, as in its "
        "authors' experiments; false: the paper's equation 17",
    )
    target_margin: NotNegative = Field(
        default=0.5, description="of `simpo`: by how much the chosen response should win"
    )
    odds_weight: NotNegative = Field(
        default=0.1, description="of `orpo`: weight of the odds ratio beside the likelihood"
    )
    desirable_weight: NotNegative = Field(default=1.0, description="of `kto`")
    undesirable_weight: NotNegative = Field(default=1.0, description="of `kto`")


class RolloutCorrectionSection(Section):
    """What becomes of tokens to which rollout and trainer give different probabilities."""

    method: Literal["truncated", "masked", "rejection"] = Field(
        examples=["truncated"],
        description="the ratio trainer / rollout is a weight of at most `high`; or a weight, 0 out "
        "of bounds; or tokens out of bounds take no part",
    )
    level: Literal["token", "sequence", "sequence_sum"] = Field(
        default="token",
        description="the ratio of each token, its geometric mean over the response, or the whole "
        "response's",
    )
    high: Positive = Field(examples=[2.0], description="upper bound of the ratio")
    low: Positive | None = Field(
        default=None, description="lower bound of `masked` and `rejection`; null: 1 / high"
    )


class OffPolicyMaskSection(Section):
    """Bad responses that the policy would hardly sample any more."""

    bound: Positive = Field(
        examples=[0.1],
        description="mean of rollout_logprobs - logprobs over a response, in nats, above which "
        "its tokens of negative advantage take no part",
    )


class AlgorithmSection(Section):
    """Settings of losses and advantages."""

    clip: Clip | None = Field(
        default=None,
        description="bounds of the policy ratio: a number or [low, high]; null: those of the "
        "loss's paper (`gspo` [3e-4, 4e-4], `gmpo` 0.4, `cispo` none below, 0.2 above, else 0.2)",
    )
    dual_clip: DualClip | None = Field(
        default=None,
        description="bound of the loss `dual_clip` for bad samples, times their advantage; null: 3",
    )
    sapo: SapoSection | None = Field(
        default=None, description="temperatures of the loss `sapo`; null: its defaults"
    )
    preference: PreferenceSection = Field(
        default=PreferenceSection(), description="losses of whole responses"
    )
    kl: KlSection = Field(default=KlSection(), description="KL penalty")
    entropy_coef: NotNegative = Field(
        default=0.0, description="weight of the policy's exact entropy, which the loss rewards"
    )
    entropy: bool = Field(
        default=False,
        description="measure that entropy as `update/entropy`; always with entropy_coef",
    )
    rollout_correction: RolloutCorrectionSection | None = Field(
        default=None, description="importance correction of the engines' mismatch; null: none"
    )
    off_policy_mask: OffPolicyMaskSection | None = Field(
        default=None, description="mask of bad, far off-policy responses; null: none"
    )
    gae: GaeSection | None = Field(
        default=None, description="advantages from a critic; null: its defaults"
    )
    lagrangian: LagrangianSection | None = Field(
        default=None, description="a limit of cost; for dataflows with the function lagrangian"
    )
    value_clip: Positive | None = Field(
        default=None,
        description="of the loss `value_clip`: how far a new value may be from that before the "
        "update; null: 0.2",
    )
    value_aggregation: Annotated[
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"],
        named(catalogue_losses.AGGREGATIONS),
    ] = Field(
        default="token_mean",
        description="how a critic's losses of tokens become one number; `aggregation` is the "
        "policy's alone",
    )
    critic_warmup_steps: int = Field(
        default=0,
        ge=0,
        le=LARGEST,
        description="steps before the main stage in which all trained models but the actor train",
    )
    agreement: AgreementSection = Field(
        default=AgreementSection(), description="whether rollout and trainer agree"
    )
    normalize_by_std: bool = Field(
        default=True,
        description="divide group-relative advantages by the group's standard deviation",
    )
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"],
        named(catalogue_losses.AGGREGATIONS),
    ] = Field(default="token_mean", description="how a policy's token losses become one number")
    loss_divisor: Positive | None = Field(
        default=None,
        description="tokens by which the aggregation `constant` divides a response's sum, such as "
        "roles.rollout.sampling.max_tokens",
    )

    def clip_bounds(self, published: tuple[float, float]) -> tuple[float, float]:
        """Low and high bound, those that are ``published`` where the recipe tells none: the ratio
        stays within [1 - low, 1 + high]."""
        if self.clip is None:
            return published
        low, high = self.clip if isinstance(self.clip, list) else (self.clip, self.clip)
        return low, high
