"""What a rule needs to know: the model's tensors and one rank of a server. Imports no torch.

SGLang's rank `r` of `tp` has the experts' place (`r // (tp/ep)`, `r % (tp/ep)`): expert
parallelism spreads whole experts over `ep` groups, and the ranks of a group cut each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_bridge.registry import HfConfig, architecture, head_dim, kv_heads

DEVICES = ("cpu", "cuda")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Server:
    """One rank of a server, and the model that it serves.

    Attributes:
        config: config.json's content, resolved.
        shapes: of every HuggingFace tensor.
        tp: ranks of the server.
        ep: groups of ranks that experts are spread over.
        rank: this one.
        device: "cpu" or "cuda".
    """

    config: HfConfig
    shapes: Shapes
    tp: int = 1
    ep: int = 1
    rank: int = 0
    device: str = "cpu"

    @property
    def heads(self) -> int:
        """Query heads of the model."""
        return self.config["num_attention_heads"]

    @property
    def kv_heads(self) -> int:
        """Key-value heads of the model."""
        return kv_heads(self.config)

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return head_dim(self.config)

    @property
    def expert_tp(self) -> int:
        """Ranks that cut each expert."""
        return self.tp // self.ep

    @property
    def expert_rank(self) -> int:
        """This rank's place among those."""
        return self.rank % self.expert_tp

    @property
    def expert_group(self) -> int:
        """The group of experts that this rank has."""
        return self.rank // self.expert_tp

    def padded(self, size: int) -> int:
        """An intermediate size as the server has it: on the CPU a multiple of 32 tp."""
        return round_up(size, 32 * self.tp) if self.device == "cpu" else size


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is no less than `value`."""
    return (value + multiple - 1) // multiple * multiple


def expert_count(config: HfConfig) -> int:
    """Routed experts of the model; 0 for a dense one."""
    return architecture(config).sizes(config).get("expert", 0)


def expert_width(config: HfConfig) -> int:
    """The intermediate size of one expert."""
    return config.get("moe_intermediate_size") or config["intermediate_size"]
