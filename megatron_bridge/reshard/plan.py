"""The plan: every copy that one rollout engine needs, from a trainer's layout to its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from megatron_bridge import regions, translation
from megatron_bridge.layout import ParallelLayout
from megatron_bridge.mappings import Weight, shapes_of
from megatron_bridge.registry import HfConfig
from megatron_bridge.reshard import targets as rollout
from megatron_bridge.reshard.copies import Copy
from megatron_bridge.reshard.planner import Held, Planner
from megatron_bridge.reshard.targets import TargetParameter, Targets

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """How one engine's parameters are made of the trainer's tensors.

    Every process computes the same from the same arguments; nothing of it travels.

    Attributes:
        config: of the model, resolved.
        layout: the trainer's.
        targets: the parameters of each rank of the engine.
        dtype: the model's in the engine.
        planner: what the trainer's ranks hold.
        copies: each element of the targets once, padding left out; in the order of target rank,
            parameter and box.
    """

    config: HfConfig
    layout: ParallelLayout
    targets: tuple[tuple[TargetParameter, ...], ...]
    dtype: str
    planner: Planner
    copies: tuple[Copy, ...]

    @property
    def weights(self) -> list[Weight]:
        """Of the model; a copy says which."""
        return self.planner.weights

    def parameter(self, copy: Copy) -> TargetParameter:
        """The parameter that a copy is for."""
        return self.targets[copy.target_rank][copy.parameter]

    def bytes_of(self, copy: Copy) -> int:
        """Bytes of a copy in the parameter's dtype."""
        return copy.elements * itemsize(self.parameter(copy).dtype or self.dtype)

    @cached_property
    def bytes_before(self) -> list[int]:
        """Bytes of all copies before each one, and behind the last of all."""
        return list(accumulate(map(self.bytes_of, self.copies), initial=0))

    @property
    def ranks(self) -> int:
        """Ranks of the engine."""
        return len(self.targets)

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of all HuggingFace tensors."""
        return sum(
            self._piece_bytes(weight, held)
            for weight in self.weights
            for held in self.planner.held(weight)
        )

    @cached_property
    def held_bytes(self) -> tuple[int, ...]:
        """Bytes of HuggingFace tensors that each trainer rank holds, without padding."""
        alike: dict[tuple[int, ...], int] = {}
        for weight in self.weights:
            for held in self.planner.held(weight):
                holders = self.planner.holders(weight, held.place)
                alike[holders] = alike.get(holders, 0) + self._piece_bytes(weight, held)
        found = [0] * self.layout.world
        for holders, size in alike.items():
            for rank in holders:
                found[rank] += size
        return tuple(found)

    def _piece_bytes(self, weight: Weight, held: Held) -> int:
        return regions.volume(held.piece.huggingface) * itemsize(weight.row.dtype or self.dtype)


def itemsize(dtype: str) -> int:
    """Bytes of one element.

    Raises:
        ValueError: for an unknown dtype.
    """
    if dtype not in _BYTES:
        raise ValueError(f"dtype '{dtype}' is not known; known: {', '.join(_BYTES)}")
    return _BYTES[dtype]


def plan(
    config: HfConfig, layout: ParallelLayout, targets: Targets, *, dtype: str | None = None
) -> ReshardPlan:
    """Which box of which trainer rank's tensor becomes which box of which engine parameter.

    Args:
        config: config.json of the model.
        layout: the trainer's.
        targets: the parameters of each rank of one engine.
        dtype: the model's in the engine; None: as config.json says (where it says nothing:
            float32, as transformers reads it). It decides over bytes alone.

    Raises:
        ValueError: the layout does not fit the model, or the targets do not.
    """
    config = translation.resolve(config)
    problems = layout.problems(config)
    if problems:
        raise ValueError(f"the trainer layout {layout} does not fit:\n- " + "\n- ".join(problems))
    planner = Planner(config, layout)
    rollout.check(targets, shapes_of(planner.weights))
    given = dtype or str(config.get("dtype") or config.get("torch_dtype") or "float32")
    name = given.removeprefix("torch.")
    itemsize(name)
    return ReshardPlan(
        config,
        layout,
        tuple(map(tuple, targets)),
        name,
        planner,
        tuple(_copies(planner, targets)),
    )


def _copies(planner: Planner, targets: Targets) -> Iterator[Copy]:
    for rank, parameters in enumerate(targets):
        for index, parameter in enumerate(parameters):
            yield from sorted(_parameter(planner, rank, index, parameter), key=_box)


def _box(copy: Copy) -> regions.Box:
    return copy.target


def _parameter(
    planner: Planner, rank: int, index: int, parameter: TargetParameter
) -> Iterator[Copy]:
    for fill in parameter.fills:
        left = regions.volume(fill.source_box)
        for number, match in planner.matches(fill) if left else ():
            holders = planner.holders(planner.weights[number], match.held.place)
            copy = Copy(number, match.view, rank, index, match.target, holders)
            left -= copy.elements
            yield copy
        assert left == 0, (parameter.name, fill)
