"""The typed recipe: every key, its default, its bounds and what it means.

Relative paths are taken from the working directory. A required key carries an example, with
which the checks go on when the key is missing, so that one run reports every fault.
"""

from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from hybridflow.recipe import catalogue_losses
from hybridflow.recipe.ranges import (
    LARGEST,
    Clip,
    Count,
    Dataflow,
    DualClip,
    Module,
    NotNegative,
    Positive,
    RunName,
    Seed,
    Text,
    named,
)
from hybridflow.recipe.schema_control import ControlSection
from hybridflow.recipe.schema_roles import ParallelSection, RolesSection
from hybridflow.recipe.section import OptimizerSection, Section
from hybridflow.recipe.source import KeyPath
from megatron_bridge.layout import ParallelLayout


class ModelSection(Section):
    """The model that the actor, the reference and the rollout start from."""

    path: Text = Field(examples=["model"], description="folder in HuggingFace format")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="type of weights and activations in training"
    )


class ClusterSection(Section):
    """The machines; on the CPU a device is a slot for one process."""

    nodes: Count = Field(default=1, description="number of machines")
    devices_per_node: Count = Field(examples=[1], description="GPUs, or CPU slots, per machine")
    peak_tflops: Positive | None = Field(
        default=None,
        description="dense TFLOP/s of a device in model.dtype, for `throughput/mfu`; null: by the "
        "GPU's name where it is known",
    )


class DataSection(Section):
    """Prompts and answers, and how many of them make a step."""

    train: Text = Field(
        examples=["train.jsonl"],
        description="JSONL, CSV or Parquet file, or a HuggingFace dataset's folder",
    )
    eval: Text | None = Field(default=None, description="held-out file of the same form")
    prompt_column: Text = Field(default="prompt", description="column of the prompt")
    answer_column: Text = Field(default="answer", description="column of the answer")
    messages_column: Text | None = Field(
        default=None,
        description="column of whole conversations, whose assistant turns a supervised step "
        "trains on; stands for prompt_column and answer_column; null: none",
    )
    turns: Literal["all", "last"] = Field(
        default="all", description="turns of the assistant in a conversation that are trained on"
    )
    chosen_column: Text = Field(default="chosen", description="column of the better response")
    rejected_column: Text = Field(default="rejected", description="column of the worse response")
    label_column: Text = Field(default="label", description="column of true or false, for `kto`")
    margin_column: Text = Field(
        default="margin", description="column of a number: by how much the better one is better"
    )
    source_column: Text | None = Field(
        default=None,
        description="column by whose values mean rewards are reported, as `reward/source/VALUE`",
    )
    chat: bool | None = Field(
        default=None,
        description="wrap prompts in the chat template; null: when the tokenizer has one",
    )
    system: str | None = Field(default=None, description="system message of the chat template")
    max_prompt_tokens: Count = Field(default=1024, description="longer prompts are left out")
    max_tokens: Count | None = Field(
        default=None,
        description="rows whose prompt and response together are longer are left out; for data "
        "that brings its responses; null: none is",
    )
    shuffle: bool = Field(default=True, description="visit the rows in a seeded random order")
    prompts_per_step: Count = Field(examples=[1], description="prompts of a training step")
    samples_per_prompt: Count = Field(default=1, description="responses to each prompt")


class WarmStartSection(OptimizerSection):
    """A supervised stage before the main one, through the same engine."""

    dataflow: Dataflow = Field(default="sft", description="graph of the stage")
    train: Text | None = Field(default=None, description="its data; null: data.train")
    steps: Count = Field(examples=[1], description="steps of the stage, one optimizer step each")
    prompts_per_step: Count = Field(examples=[1], description="rows of a step")


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
        "of the function token_rewards)",
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


class EvaluationSection(Section):
    """Scores on the held-out file while training."""

    every: Count = Field(examples=[1], description="steps between evaluations")
    prompts: Count | None = Field(
        default=None, description="rows to evaluate; null: all of data.eval"
    )
    samples_per_prompt: Count = Field(default=1, description="responses to each prompt")
    temperature: NotNegative = Field(default=0.0, description="0 takes the likeliest token")


class CheckpointSection(Section):
    """Checkpoints to resume from."""

    every: Count | None = Field(default=None, description="steps between checkpoints; null: none")
    keep: Count = Field(default=2, description="newest checkpoints to keep")


class Recipe(Section):
    """A whole run."""

    name: RunName = Field(examples=["run"], description="name of the run")
    seed: Seed = Field(default=0, description="seed of data order, initialisation and sampling")
    output: Text | None = Field(default=None, description="folder of the run; null: runs/NAME")
    imports: list[Module] = Field(
        default=[],
        description="your own modules, `pkg.mod` or `file.py`, which register functions, losses "
        "or rewards; `check` runs them too",
    )
    model: ModelSection = Field(examples=[{"path": "model"}], description="the model")
    cluster: ClusterSection = Field(examples=[{"devices_per_node": 1}], description="the machines")
    data: DataSection = Field(
        examples=[{"train": "train.jsonl", "prompts_per_step": 1}], description="the data"
    )
    steps: Count = Field(examples=[1], description="steps of the main stage")
    warm_start: WarmStartSection | None = Field(
        default=None, description="a supervised stage before it"
    )
    roles: RolesSection = Field(
        examples=[
            {"actor": {"optimizer": {"lr": 1e-6}}, "rollout": {"sampling": {"max_tokens": 1}}}
        ],
        description="who takes part",
    )
    dataflow: Dataflow = Field(
        examples=["grpo"], description="a shipped graph's name, a path ending in .yaml, or a graph"
    )
    algorithm: AlgorithmSection = Field(
        default=AlgorithmSection(), description="losses and advantages"
    )
    evaluation: EvaluationSection | None = Field(
        default=None, description="evaluation while training"
    )
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), description="checkpoints")
    control: ControlSection | None = Field(
        default=None, description="an HTTP port while the run goes on; null: none"
    )
    export: bool = Field(default=True, description="write the final model in HuggingFace format")

    _origins: dict[KeyPath, str] = PrivateAttr(default_factory=lambda: {(): "recipe"})

    def __eq__(self, other: object) -> bool:
        """Equal values; where they were written does not matter."""
        return isinstance(other, Recipe) and self.model_dump() == other.model_dump()

    @property
    def old_bound(self) -> float:
        """``algorithm.agreement.old_bound``, by the model's type where it is not told."""
        told = self.algorithm.agreement.old_bound
        return told or (1e-3 if self.model.dtype == "float32" else 0.1)

    @property
    def folder(self) -> str:
        """Folder of the run."""
        return self.output or f"runs/{self.name}"

    def origin(self, key: str) -> str:
        """``file:line`` of a dotted key, of the nearest enclosing one when it is a default."""
        return self.origin_of(tuple(key.split(".")) if key else ())

    def origin_of(self, path: KeyPath) -> str:
        """The same for a key path, which may hold list indices."""
        while path and path not in self._origins:
            path = path[:-1]
        return self._origins[path]

    def layout(self, role: str) -> ParallelLayout:
        """Parallel layout of a model role: its own, else the actor's, else one rank."""
        told = self.roles.models()[role].parallel
        if told is None and self.roles.actor is not None:
            told = self.roles.actor.parallel
        return (told or ParallelSection()).layout()

    def model_path(self, role: str) -> str:
        """Folder that a model role starts from."""
        return getattr(self.roles.models()[role], "model", None) or self.model.path
