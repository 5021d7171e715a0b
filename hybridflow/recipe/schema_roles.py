"""The recipe's roles: who trains, who samples, who scores."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from hybridflow.recipe.ranges import (
    LARGEST,
    Count,
    Deadline,
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

Head = Literal["value", "vocabulary"]


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

    model: Text | None = Field(
        default=None,
        description="folder of its own; null: the policy from which the stage starts",
    )
    parallel: ParallelSection | None = Field(
        default=None, description="how it is cut; null: as the actor"
    )
    micro_batch_tokens: Count = Field(
        default=8192, description="most tokens of one packed forward pass"
    )
    colocate: Literal["actor"] | None = Field(default=None, description="share the actor's devices")


class ModelRoleSection(Section):
    """What every Megatron model beside the actor and the reference is told."""

    model: Text | None = Field(
        default=None, description="folder that it starts from; null: as model.path"
    )
    parallel: ParallelSection | None = Field(
        default=None, description="how it is cut; null: as the actor"
    )
    micro_batch_tokens: Count = Field(
        default=8192, description="most tokens of one packed forward pass"
    )
    mini_batches: Count = Field(
        default=1, description="optimizer steps in one pass over a step's samples"
    )
    epochs: Count = Field(default=1, description="passes over a step's samples")
    colocate: Text | None = Field(
        default=None, description="role whose devices it shares; null: devices of its own"
    )


class CriticSection(ModelRoleSection):
    """The value model: one number a token, trained beside the actor."""

    optimizer: OptimizerSection = Field(
        examples=[{"lr": 1e-5}], description="optimizer of the stages that train it"
    )

    @property
    def head(self) -> Head:
        """What the model ends in."""
        return "value"


class FurtherModelSection(ModelRoleSection):
    """A further model; any role with the key `head` is one."""

    head: Head = Field(
        examples=["value"],
        description="what it ends in: one number a token, or the vocabulary",
    )
    optimizer: OptimizerSection | None = Field(
        default=None, description="optimizer of the stages that train it; null: it is frozen"
    )


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
    mode: Literal["standby", "bucketed"] | None = Field(
        default=None,
        description="of `direct`: whole shards beside the server, two of them kept; or two buckets "
        "while the server waits; null: standby",
    )
    bucket: Size = Field(
        default="512MiB",
        description="most bytes on their way at once, at least 4KiB; twice of them in memory",
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
    timeout_seconds: Deadline = Field(
        default=600.0, description="deadline of each phase of a publication"
    )
    directory: Text = Field(
        default="/dev/shm",
        description="folder of each host's memory (of `disk`: one that all hosts see)",
    )

    @property
    def stands_by(self) -> bool:
        """Whether whole shards wait beside the servers."""
        return self.transport == "direct" and self.mode != "bucketed"

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


def further_role_section(value: Any) -> type[RewardSection | FurtherModelSection] | None:
    """The section of a role of any other name, told by its keys; None when it is neither."""
    if isinstance(value, RewardSection | FurtherModelSection):
        return type(value)
    if not isinstance(value, Mapping):
        return None
    if "head" in value:
        return FurtherModelSection
    return RewardSection if {"function", "functions"} & value.keys() else None


def _tag(value: Any) -> str | None:
    section = further_role_section(value)
    return None if section is None else section.__name__


_Reward = Annotated[RewardSection, Tag("RewardSection")]
_Model = Annotated[FurtherModelSection, Tag("FurtherModelSection")]
FurtherRole = Annotated[_Reward | _Model, Discriminator(_tag)]
RewardRole = Annotated[
    _Reward | _Model, Discriminator(lambda value: _tag(value) or RewardSection.__name__)
]
"""A model where it has the key `head`, else functions."""

TrainedSection = ActorSection | CriticSection | FurtherModelSection
AnyModelSection = TrainedSection | ReferenceSection


class RolesSection(Section):
    """Who takes part; further names are reward roles (`function`) or models (`head`)."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, FurtherRole] = Field(init=False)  # pyright: ignore

    actor: ActorSection | None = Field(
        default=None, description="the trained model; for dataflows that act on it"
    )
    reference: ReferenceSection | None = Field(default=None, description="the frozen model, for KL")
    critic: CriticSection | None = Field(default=None, description="the value model")
    rollout: RolloutSection | None = Field(
        default=None, description="the servers; for dataflows that sample"
    )
    reward: RewardRole | None = Field(
        default=None, description="what scores: functions, or with `head: value` a model"
    )

    @property
    def servers(self) -> RolloutSection:
        """The section of the rollout role, in a run whose graphs sample."""
        assert self.rollout is not None, "a checked graph acts on roles of the recipe alone"
        return self.rollout

    def rewards(self) -> dict[str, RewardSection]:
        """Every reward role by name."""
        named = {"reward": self.reward, **self._further()}
        return {name: s for name, s in named.items() if isinstance(s, RewardSection)}

    def models(self) -> dict[str, AnyModelSection]:
        """Every role with a Megatron model by name, the actor first where there is one."""
        found: dict[str, AnyModelSection | None] = {
            "actor": self.actor,
            "reference": self.reference,
            "critic": self.critic,
        }
        named = {"reward": self.reward, **self._further()}
        found |= {name: s for name, s in named.items() if isinstance(s, FurtherModelSection)}
        return {name: section for name, section in found.items() if section is not None}

    def trained(self) -> dict[str, TrainedSection]:
        """The models that have an optimizer."""
        return {
            name: section
            for name, section in self.models().items()
            if not isinstance(section, ReferenceSection) and section.optimizer is not None
        }

    def kinds(self) -> dict[str, RoleKind]:
        """Every role of the recipe and its kind."""
        found: dict[str, RoleKind] = {
            name: "value" if getattr(section, "head", None) == "value" else "model"
            for name, section in self.models().items()
        }
        if self.rollout is not None:
            found["rollout"] = "rollout"
        return {**found, **dict.fromkeys(self.rewards(), "reward")}

    def hosts(self) -> dict[str, str]:
        """Role -> the role whose devices it asks to share."""
        sections = {**self.models(), "rollout": self.rollout}
        found = {name: getattr(section, "colocate", None) for name, section in sections.items()}
        return {name: host for name, host in found.items() if host is not None}

    def _further(self) -> dict[str, RewardSection | FurtherModelSection]:
        return self.__pydantic_extra__ or {}
