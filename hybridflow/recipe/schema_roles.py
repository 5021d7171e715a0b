"""The recipe's roles: who trains, who samples, who scores."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from hybridflow.recipe.ranges import (
    LARGEST,
    Count,
    Positive,
    Seconds,
    Size,
    Text,
    TopK,
)
from hybridflow.recipe.schema_rewards import RewardSection
from hybridflow.recipe.section import OptimizerSection, Section
from hybridflow.recipe.signature import RoleKind
from megatron_bridge.convert.sizes import parse_bytes
from megatron_bridge.layout import ParallelLayout


class ParallelSection(Section):
    """How a Megatron model is cut over devices."""

    tp: Count = Field(default=1, description="tensor parallel size")
    pp: Count = Field(default=1, description="pipeline parallel size")
    dp: Count = Field(default=1, description="data parallel size")
    ep: Count = Field(
        default=1, description="expert parallel size; `etp * ep` divides `tp * dp`, adds no device"
    )
    etp: Count | None = Field(
        default=None, description="tensor parallel size within an expert; null: as `tp`"
    )
    first_stage_layers: Count | None = Field(
        default=None, description="layers of the first pipeline stage; null: as the others"
    )
    last_stage_layers: Count | None = Field(
        default=None, description="layers of the last pipeline stage; null: as the others"
    )

    def layout(self) -> ParallelLayout:
        """The same as the layout object of the engine."""
        sizes: dict[str, Any] = self.model_dump()
        sizes["etp"] = None if self.etp == self.tp else self.etp
        return ParallelLayout(**sizes)


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
    ep: Count = Field(
        default=1, description="groups of a server's devices over which its experts are spread"
    )


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

    transport: Literal["direct", "broadcast", "disk"] = Field(
        default="direct",
        description="each server rank gets the bytes that it needs; or whole tensors over SGLang's "
        "own broadcast; or whole tensors through a shared folder",
    )
    mode: Literal["standby", "bucketed"] = Field(
        default="standby",
        description="of `direct`: whole shards beside the server, two of them kept; or two buckets "
        "while the server waits",
    )
    bucket: Size = Field(
        default="512MiB", description="most bytes on their way at once, twice of them in memory"
    )
    pause: Literal["retract", "abort", "in_place"] = Field(
        default="retract",
        description="what becomes of running samples: begun anew with the tokens they have, ended "
        "as they are, or gone on with under a cache of older weights",
    )
    full_every: Count | None = Field(
        default=None,
        description="of `disk`: write what has changed alone, and whole versions this often; "
        "null: whole ones only",
    )
    timeout_seconds: Seconds = Field(
        default=600.0, description="deadline of each phase of a publication"
    )
    directory: Text = Field(
        default="/dev/shm",
        description="folder of each host's memory (of `disk`: one that all hosts see)",
    )

    @property
    def bucket_bytes(self) -> int:
        """Most bytes of one bucket."""
        return parse_bytes(self.bucket)


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
    start_timeout_seconds: Seconds = Field(
        default=180.0, description="deadline of a server's start"
    )
    request_timeout_seconds: Seconds = Field(default=600.0, description="deadline of a request")
    colocate: Literal["actor"] | None = Field(default=None, description="share the actor's devices")
    python: Text | None = Field(
        default=None,
        description="interpreter of SGLang's environment; null: .venv-sglang/bin/python",
    )
    sync: SyncSection = Field(default=SyncSection(), description="weight sync")
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=LARGEST,
        description="most versions by which the weights that sampled may be older than those that "
        "are updated; 0: on-policy",
    )
    repair_seconds: Seconds = Field(
        default=300.0, description="deadline for bringing a failed server back"
    )


class RolesSection(Section):
    """Who takes part; further names are reward roles."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, RewardSection] = Field(init=False)  # pyright: ignore

    actor: ActorSection = Field(
        examples=[{"optimizer": {"lr": 1e-6}}], description="the trained model"
    )
    reference: ReferenceSection | None = Field(default=None, description="the frozen model, for KL")
    rollout: RolloutSection | None = Field(
        default=None, description="the servers; for dataflows that sample"
    )
    reward: RewardSection | None = Field(default=None, description="the rule that scores")

    @property
    def servers(self) -> RolloutSection:
        """The section of the rollout role, in a run whose graphs sample."""
        assert self.rollout is not None, "a checked graph acts on roles of the recipe alone"
        return self.rollout

    def rewards(self) -> dict[str, RewardSection]:
        """Every reward role by name."""
        own = {} if self.reward is None else {"reward": self.reward}
        return {**own, **(self.__pydantic_extra__ or {})}

    def kinds(self) -> dict[str, RoleKind]:
        """Every role of the recipe and its kind."""
        models: dict[str, RoleKind] = {"actor": "model"}
        if self.rollout is not None:
            models["rollout"] = "rollout"
        if self.reference is not None:
            models["reference"] = "model"
        return {**models, **dict.fromkeys(self.rewards(), "reward")}
