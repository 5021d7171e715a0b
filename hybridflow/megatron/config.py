"""What a training engine is told; nothing is read from anywhere else."""

from dataclasses import dataclass

import torch

from hybridflow.algorithms.losses.preference import PreferenceSettings
from hybridflow.recipe.names import hint
from megatron_bridge.layout import ParallelLayout

SCHEDULES = ("constant", "linear", "cosine")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its learning rate over ``total_steps`` optimizer steps.

    Attributes:
        clip_grad: largest global gradient norm; 0 leaves gradients as they are.
        weight_decay: decoupled; norms and biases are spared.
        schedule: ``constant``, or ``linear`` or ``cosine`` from ``lr`` down to ``min_lr`` at
            ``total_steps``, each after ``warmup_steps`` of linear warm-up.
        total_steps: optimizer steps of the stage; needed by falling schedules alone.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    min_lr: float = 0.0
    total_steps: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule '{self.schedule}' is unknown: {hint(self.schedule, SCHEDULES)}"
            )
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule '{self.schedule}' falls over total_steps={self.total_steps}, which "
                f"must be greater than warmup_steps={self.warmup_steps}"
            )


@dataclass(frozen=True)
class CorrectionSettings:
    """See ``hybridflow.algorithms.correction.correct``."""

    method: str
    level: str
    low: float
    high: float


@dataclass(frozen=True)
class LossSettings:
    """How a batch becomes optimizer steps.

    Attributes:
        name: an entry of ``hybridflow.algorithms.LOSSES``.
        clip_low, clip_high: bounds of the ratio, ``[1 - low, 1 + high]``.
        dual_clip, tau_positive, tau_negative: see ``hybridflow.algorithms.losses.TokenInputs``.
        kl_coef: weight of the KL term against ``ref_logprobs``; at 0 the KL is a metric alone.
        entropy_coef: weight of the policy's exact entropy, which the loss is lowered by.
        measure_entropy: whether to compute that entropy as a metric too when its weight is 0.
        correction: of the mismatch between trainer and rollout; None: none.
        off_policy_bound: see ``hybridflow.algorithms.correction.off_policy_masked``; None: no mask.
        aggregation: an entry of ``hybridflow.algorithms.AGGREGATIONS``.
        loss_divisor: tokens by which the aggregation ``constant`` divides.
        temperature: of the sampler; logits are divided by it here too.
        mini_batches: optimizer steps per epoch; the k-th takes the k-th run of every rank's
            prompts, together the k-th run of the whole batch's (``MiniBatches`` deals them so).
        epochs: passes over the batch.
        preference: of losses of whole responses.
        lr_scale: times the schedule's learning rate at each optimizer step.
        agreement_threshold: of a token's difference between rollout and trainer, in nats, above
            which it is counted.
        agreement_bound: largest such difference, above which the update is an error; None: any.
        old_bound: mean difference in nats between ``old_logprobs`` and the weights' own before the
            first optimizer step, above which the update is an error; None: any.
        weight_version: that the trainer's weights are. With the field ``token_versions``, rollout
            and trainer are compared on tokens of this version alone.
    """

    name: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    measure_entropy: bool = False
    correction: CorrectionSettings | None = None
    off_policy_bound: float | None = None
    aggregation: str = "token_mean"
    loss_divisor: float = 1.0
    temperature: float = 1.0
    mini_batches: int = 1
    epochs: int = 1
    lr_scale: float = 1.0
    preference: PreferenceSettings = PreferenceSettings()
    agreement_threshold: float = 0.01
    agreement_bound: float | None = None
    old_bound: float | None = None
    weight_version: int | None = None

    @property
    def reads_entropy(self) -> bool:
        """Whether the exact entropy is computed at all."""
        return self.measure_entropy or self.entropy_coef != 0

    @property
    def on_policy(self) -> bool:
        """Whether the only optimizer step sees the weights that the batch was sampled with."""
        return self.mini_batches * self.epochs == 1


@dataclass(frozen=True)
class ValueLossSettings:
    """How a batch becomes optimizer steps of a critic.

    Attributes:
        name: an entry of ``hybridflow.algorithms.VALUE_LOSSES``.
        clip: of the loss ``value_clip``.
        aggregation, mini_batches, epochs, lr_scale: as of ``LossSettings``.
    """

    name: str = "value_clip"
    clip: float = 0.2
    aggregation: str = "token_mean"
    mini_batches: int = 1
    epochs: int = 1
    lr_scale: float = 1.0

    @property
    def temperature(self) -> float:
        """Values are not divided by it."""
        return 1.0


@dataclass(frozen=True)
class EngineConfig:
    """One role's model on this group of ranks.

    Attributes:
        model_path: folder in HuggingFace format.
        optimizer: None for a model that never trains (no gradient buffers are made).
        micro_batch_tokens: most input tokens of one packed forward pass.
        keep_reference_head: whether to hold the output head as it was loaded, for the KL
            estimator ``full``.
        head: ``vocabulary``, or ``value`` for a model that ends in one number a token.
    """

    model_path: str
    layout: ParallelLayout
    dtype: torch.dtype = torch.float32
    seed: int = 0
    optimizer: OptimizerSettings | None = None
    micro_batch_tokens: int = 8192
    keep_reference_head: bool = False
    head: str = "vocabulary"
