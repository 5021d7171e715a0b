"""The typed recipe: every key, its default, its bounds and what it means.

Relative paths are taken from the working directory. A required key carries an example, with
which the checks go on when the key is missing, so that one run reports every fault.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from hybridflow.recipe.catalogue import RoleKind
from hybridflow.recipe.ranges import (
    Betas,
    Clip,
    Count,
    Dataflow,
    FunctionPath,
    NotNegative,
    Positive,
    RunName,
    Text,
    TopK,
)
from hybridflow.recipe.source import KeyPath
from megatron_bridge.layout import ParallelLayout


class Section(BaseModel):
    """A mapping of the recipe: unknown keys are errors, values keep their YAML type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


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


class DataSection(Section):
    """Prompts and answers, and how many of them make a step."""

    train: Text = Field(
        examples=["train.jsonl"],
        description="JSONL, CSV or Parquet file, or a HuggingFace dataset's folder",
    )
    eval: Text | None = Field(default=None, description="held-out file of the same form")
    prompt_column: Text = Field(default="prompt", description="column of the prompt")
    answer_column: Text = Field(default="answer", description="column of the answer")
    chat: bool | None = Field(
        default=None,
        description="wrap prompts in the chat template; null: when the tokenizer has one",
    )
    system: str | None = Field(default=None, description="system message of the chat template")
    max_prompt_tokens: Count = Field(default=1024, description="longer prompts are left out")
    shuffle: bool = Field(default=True, description="visit the rows in a seeded random order")
    prompts_per_step: Count = Field(examples=[1], description="prompts of a training step")
    samples_per_prompt: Count = Field(default=1, description="responses to each prompt")


class OptimizerSection(Section):
    """AdamW and its learning rate over the optimizer steps of a stage."""

    lr: Positive = Field(examples=[1e-6], description="peak learning rate")
    betas: Betas = Field(default=[0.9, 0.999], description="decay of the first and second moments")
    eps: Positive = Field(default=1e-8, description="added to the root of the second moment")
    weight_decay: NotNegative = Field(default=0.0, description="decoupled weight decay")
    clip_grad: NotNegative = Field(
        default=1.0, description="largest global gradient norm; 0: no clipping"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="course of the learning rate after the warm-up"
    )
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warm-up")
    min_lr: NotNegative = Field(
        default=0.0, description="learning rate at the end of a falling schedule"
    )


class WarmStartSection(OptimizerSection):
    """A supervised stage before the main one, through the same engine."""

    dataflow: Dataflow = Field(default="sft", description="graph of the stage")
    train: Text | None = Field(default=None, description="its data; null: data.train")
    steps: Count = Field(examples=[1], description="steps of the stage, one optimizer step each")
    prompts_per_step: Count = Field(examples=[1], description="rows of a step")


class ParallelSection(Section):
    """How a Megatron model is cut over devices."""

    tp: Count = Field(default=1, description="tensor parallel size")
    pp: Count = Field(default=1, description="pipeline parallel size")
    dp: Count = Field(default=1, description="data parallel size")

    def layout(self) -> ParallelLayout:
        """The same as the layout object of the engine."""
        return ParallelLayout(tp=self.tp, pp=self.pp, dp=self.dp)


class ActorSection(Section):
    """The model that is trained."""

    parallel: ParallelSection = Field(default=ParallelSection(), description="how it is cut")
    optimizer: OptimizerSection = Field(
        examples=[{"lr": 1e-6}], description="optimizer of the main stage"
    )
    micro_batch_tokens: Count = Field(
        default=8192, description="most tokens of one packed forward pass"
    )
    mini_batches: Count = Field(
        default=1, description="optimizer steps in one pass over a step's samples"
    )
    epochs: Count = Field(default=1, description="passes over a step's samples")


class ReferenceSection(Section):
    """The frozen model that the KL term compares with."""

    parallel: ParallelSection | None = Field(
        default=None, description="how it is cut; null: as the actor"
    )
    micro_batch_tokens: Count = Field(
        default=8192, description="most tokens of one packed forward pass"
    )
    colocate: Literal["actor"] | None = Field(default=None, description="share the actor's devices")


class RolloutParallelSection(Section):
    """Servers and the devices of each."""

    tp: Count = Field(default=1, description="devices of one server")
    dp: Count = Field(default=1, description="number of servers")


class SamplingSection(Section):
    """How responses are drawn in training."""

    temperature: Positive = Field(default=1.0, description="divides the logits")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="smallest mass of tokens to draw from"
    )
    top_k: TopK = Field(default=-1, description="most tokens to draw from; -1: all")
    max_tokens: Count = Field(examples=[1], description="most tokens of a response")


class SyncSection(Section):
    """How weights reach the servers."""

    directory: Text = Field(
        default="/dev/shm", description="folder that trainer and servers both see"
    )


class RolloutSection(Section):
    """The servers that sample responses."""

    engine: Literal["local", "sglang"] = Field(
        default="local", description="our own small engine, or the SGLang server"
    )
    parallel: RolloutParallelSection = Field(
        default=RolloutParallelSection(), description="servers"
    )
    sampling: SamplingSection = Field(examples=[{"max_tokens": 1}], description="sampling")
    threads: Count = Field(default=1, description="CPU threads of each server")
    max_running_requests: Count | None = Field(
        default=None, description="most samples that a server decodes at once; null: its own choice"
    )
    start_timeout_seconds: Positive = Field(
        default=180.0, description="deadline of a server's start"
    )
    request_timeout_seconds: Positive = Field(default=600.0, description="deadline of a request")
    colocate: Literal["actor"] | None = Field(default=None, description="share the actor's devices")
    python: Text | None = Field(
        default=None,
        description="interpreter of SGLang's environment; null: .venv-sglang/bin/python",
    )
    sync: SyncSection = Field(default=SyncSection(), description="weight sync")


class RewardSection(Section):
    """A rule that scores responses; any role with the key `function` is one."""

    function: FunctionPath = Field(
        examples=["exact_match"], description="a reward's name, `pkg.mod.fn` or `file.py:fn`"
    )
    parameters: dict[str, Any] = Field(default={}, description="keyword arguments of the function")
    workers: Count = Field(default=1, description="processes that score")
    timeout_seconds: Positive = Field(default=60.0, description="deadline of one batch's scoring")


class RolesSection(Section):
    """Who takes part; further names are reward roles."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, RewardSection] = Field(init=False)  # pyright: ignore

    actor: ActorSection = Field(
        examples=[{"optimizer": {"lr": 1e-6}}], description="the trained model"
    )
    reference: ReferenceSection | None = Field(default=None, description="the frozen model, for KL")
    rollout: RolloutSection = Field(
        examples=[{"sampling": {"max_tokens": 1}}], description="the servers"
    )
    reward: RewardSection | None = Field(default=None, description="the rule that scores")

    def rewards(self) -> dict[str, RewardSection]:
        """Every reward role by name."""
        own = {} if self.reward is None else {"reward": self.reward}
        return {**own, **(self.__pydantic_extra__ or {})}

    def kinds(self) -> dict[str, RoleKind]:
        """Every role of the recipe and its kind."""
        models: dict[str, RoleKind] = {"actor": "model", "rollout": "rollout"}
        if self.reference is not None:
            models["reference"] = "model"
        return {**models, **dict.fromkeys(self.rewards(), "reward")}


class KlSection(Section):
    """The penalty for leaving the reference."""

    coef: NotNegative = Field(default=0.0, description="weight of the KL term in the loss")
    estimator: Literal["k1", "k2", "k3", "abs"] = Field(
        default="k3", description="estimator of the KL"
    )


class AlgorithmSection(Section):
    """Settings of losses and advantages."""

    clip: Clip = Field(
        default=0.2, description="bounds of the policy ratio: a number or [low, high]"
    )
    kl: KlSection = Field(default=KlSection(), description="KL penalty")
    normalize_by_std: bool = Field(
        default=True,
        description="divide group-relative advantages by the group's standard deviation",
    )
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"] = (
        Field(default="token_mean", description="how token losses become one number")
    )

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Low and high bound: the ratio stays within [1 - low, 1 + high]."""
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
    seed: int = Field(
        default=0, ge=0, description="seed of data order, initialisation and sampling"
    )
    output: Text | None = Field(default=None, description="folder of the run; null: runs/NAME")
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
    export: bool = Field(default=True, description="write the final model in HuggingFace format")

    _origins: dict[KeyPath, str] = PrivateAttr(default_factory=lambda: {(): "recipe"})

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
        """Parallel layout of a model role; the reference's is the actor's unless it has its own."""
        reference = self.roles.reference
        if role == "reference" and reference is not None and reference.parallel is not None:
            return reference.parallel.layout()
        return self.roles.actor.parallel.layout()
