"""The typed recipe: every key, its default, its bounds and what it means.

Relative paths are taken from the working directory. A required key carries an example, with
which the checks go on when the key is missing, so that one run reports every fault.
"""

from typing import Literal

from pydantic import Field, PrivateAttr

from hybridflow.recipe.ranges import (
    Count,
    Dataflow,
    Module,
    NotNegative,
    Positive,
    RunName,
    Seed,
    Text,
)
from hybridflow.recipe.schema_algorithm import AlgorithmSection
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
