"""The parallel layout of a Megatron model. Imports no torch."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Coordinates(NamedTuple):
    """A rank's place in each parallel dimension."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Tensor, pipeline and data parallel sizes; one object validates and places ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of ``rank`` in Megatron's order, tp fastest, then dp, then pp."""
        return Coordinates(rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp))

    def problems(self, hf_config: dict[str, Any]) -> list[str]:
        """Every reason why a model of this config cannot be cut so, each with its fix."""
        heads = hf_config["num_attention_heads"]
        cut_by_tp = {
            "num_attention_heads": heads,
            "num_key_value_heads": hf_config.get("num_key_value_heads") or heads,
            "intermediate_size": hf_config["intermediate_size"],
        }
        found = [
            f"tp={self.tp} does not divide {name}={size}; choose tp from "
            f"{_divisors(cut_by_tp.values())}"
            for name, size in cut_by_tp.items()
            if size % self.tp
        ]
        layers = hf_config["num_hidden_layers"]
        if layers % self.pp:
            found.append(
                f"pp={self.pp} does not divide num_hidden_layers={layers}; choose pp from "
                f"{_divisors([layers])}"
            )
        return found


def _divisors(sizes: Any) -> list[int]:
    sizes = list(sizes)
    return [n for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes)]
