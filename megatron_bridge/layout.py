"""The parallel layout of a Megatron model: who holds which layers and experts. Imports no torch."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

_LARGEST_CHOICE = 4096  # parallel sizes above are not proposed


class Coordinates(NamedTuple):
    """A rank's place in each parallel dimension of the layers without experts."""

    tp: int
    dp: int
    pp: int


class ExpertCoordinates(NamedTuple):
    """A rank's place in each parallel dimension of the experts."""

    etp: int
    ep: int
    edp: int
    pp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel sizes of one model; one object validates, places ranks and spreads layers.

    Attributes:
        tp, pp, dp: tensor, pipeline and data parallel sizes.
        ep: expert parallel size; experts are spread over ranks of the tensor and data parallel
            dimensions, so that ``etp * ep`` divides ``tp * dp``.
        etp: tensor parallel size within an expert; None: as ``tp``.
        vpp: model chunks of each pipeline rank (interleaved pipeline); 1: one.
        first_stage_layers, last_stage_layers: layers of the first and the last pipeline rank where
            they differ from the others'.

    Raises:
        ValueError: for a size that is not a whole number of at least 1.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        given = {field: getattr(self, field.name) for field in fields(self)}
        bad = [
            f"{field.name}={size!r}"
            for field, size in given.items()
            if not (_is_size(size) or (size is None and field.default is None))
        ]
        if bad:
            raise ValueError(
                f"parallel sizes are whole numbers of at least 1, {', '.join(bad)} is none"
            )

    @classmethod
    def parse(cls, text: str) -> "ParallelLayout":
        """The layout that ``tp=8,pp=16,ep=64`` says.

        Raises:
            ValueError: for an unknown name or a size that is not a positive integer.
        """
        names = [field.name for field in fields(cls)]
        values: dict[str, int] = {}
        for item in filter(None, text.replace(" ", "").split(",")):
            name, _, size = item.partition("=")
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise ValueError(f"'{name}' is no parallel size{hint} Known: {', '.join(names)}")
            if not size.isdigit() or int(size) < 1:
                raise ValueError(f"{name}={size} is not a positive whole number")
            if name in values:
                raise ValueError(f"{name} is given twice")
            values[name] = int(size)
        return cls(**values)

    def __str__(self) -> str:
        plain = ParallelLayout()
        return ",".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name in ("tp", "pp", "dp")
            or getattr(self, field.name) != getattr(plain, field.name)
        )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size within an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert."""
        return self.tp * self.dp // (self.expert_tp * self.ep)

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of ``rank`` in Megatron's order, tp fastest, then dp, then pp."""
        return Coordinates(rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp))

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Coordinates of ``rank`` for experts: etp fastest, then ep, then their replicas."""
        stage = self.tp * self.dp
        inside, etp = rank % stage, self.expert_tp
        return ExpertCoordinates(
            inside % etp, inside // etp % self.ep, inside // (etp * self.ep), rank // stage
        )

    def rank(self, *, tp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates."""
        return tp + self.tp * (dp + self.dp * pp)

    def expert_rank(self, *, etp: int = 0, ep: int = 0, edp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates of the experts."""
        return etp + self.expert_tp * (ep + self.ep * edp) + self.tp * self.dp * pp

    def layers_of(self, layers: int, pp: int) -> int:
        """How many of a model's ``layers`` pipeline rank ``pp`` holds."""
        if pp == 0 and self.first_stage_layers is not None:
            return self.first_stage_layers
        if pp == self.pp - 1 and self.last_stage_layers is not None:
            return self.last_stage_layers
        return self._spread(layers) // max(self._even_stages, 1)

    def _spread(self, layers: int) -> int:
        """Layers that the stages without a number of their own share."""
        return layers - (self.first_stage_layers or 0) - (self.last_stage_layers or 0)

    @property
    def _even_stages(self) -> int:
        own = [n for n in (self.first_stage_layers, self.last_stage_layers) if n is not None]
        return self.pp - len(own)

    def stage_layers(self, layers: int, pp: int, chunk: int = 0) -> range:
        """The layers of one model chunk, counted from 0 over the whole model.

        Chunk 0 of every pipeline rank comes before chunk 1 of the first.
        """
        counts = [self.layers_of(layers, stage) // self.vpp for stage in range(self.pp)]
        start = chunk * sum(counts) + sum(counts[:pp])
        return range(start, start + counts[pp])

    def stage_of(self, layers: int, layer: int) -> tuple[int, int]:
        """Pipeline rank and model chunk that hold a layer."""
        counts = [self.layers_of(layers, stage) // self.vpp for stage in range(self.pp)]
        chunk, inside = divmod(layer, sum(counts))
        for stage, count in enumerate(counts):
            if inside < count:
                return stage, chunk
            inside -= count
        raise AssertionError((self, layers, layer))

    def problems(self, hf_config: dict[str, Any]) -> list[str]:
        """Every reason why a model of this config cannot be cut so, each with its fix."""
        return [*self._own_problems(), *self._stages(hf_config), *self._widths(hf_config)]

    def _own_problems(self) -> list[str]:
        found = []
        if self.tp * self.dp % (self.expert_tp * self.ep):
            found.append(
                f"etp*ep={self.expert_tp}*{self.ep} does not divide tp*dp={self.tp}*{self.dp}; "
                f"choose ep from {_divisors([self.tp * self.dp // self.expert_tp])}"
                if self.tp * self.dp % self.expert_tp == 0
                else f"etp={self.expert_tp} does not divide tp*dp={self.tp}*{self.dp}; choose etp "
                f"from {_divisors([self.tp * self.dp])}"
            )
        if self.vpp > 1 and self.pp == 1:
            found.append(f"vpp={self.vpp} needs pp greater than 1")
        if self.pp == 1 and (self.first_stage_layers or self.last_stage_layers):
            found.append(
                "first_stage_layers and last_stage_layers need pp greater than 1; leave them out"
            )
        return found

    def _stages(self, config: dict[str, Any]) -> list[str]:
        layers = config["num_hidden_layers"]
        left, stages = self._spread(layers), self._even_stages
        if self.pp == 1 or (stages == 0 and left == 0):
            return self._chunks(layers)
        if stages == 0 or left <= 0:
            return [
                f"first_stage_layers={self.first_stage_layers} and last_stage_layers="
                f"{self.last_stage_layers} leave {left} of num_hidden_layers={layers} layers for "
                f"{stages} other stages; every stage needs a layer, and every layer a stage"
            ]
        if left % stages and stages == self.pp:
            return [
                f"pp={self.pp} does not divide num_hidden_layers={layers}; choose pp from "
                f"{_divisors([layers])}, or set first_stage_layers or last_stage_layers"
            ]
        if left % stages:
            return [
                f"{left} layers do not divide over the {stages} pipeline stages that "
                "first_stage_layers and last_stage_layers leave; change one of the three"
            ]
        return self._chunks(layers)

    def _chunks(self, layers: int) -> list[str]:
        counts = sorted({self.layers_of(layers, stage) for stage in range(self.pp)})
        return [
            f"vpp={self.vpp} does not divide the {count} layers of a pipeline stage"
            for count in counts
            if count % self.vpp
        ]

    def _widths(self, config: dict[str, Any]) -> list[str]:
        from megatron_bridge.registry import cut_sizes

        sizes = {"tp": self.tp, "etp": self.expert_tp, "ep": self.ep}
        cuts = cut_sizes(config)
        experts = any(cut.by == "ep" for cut in cuts)
        wanted = {"ep": self.ep, "etp": self.etp} if not experts else {}
        return [
            f"{name}={size} needs a model with experts, and this one has none; leave {name} out"
            for name, size in wanted.items()
            if size not in (None, 1)
        ] + [
            f"{cut.by}={sizes[cut.by]} does not divide {cut.field}={cut.size}; choose {cut.by} "
            f"from {_fitting([other for other in cuts if other.by == cut.by])}"
            for cut in cuts
            if not cut.fits(sizes[cut.by])
        ]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _fitting(cuts: list[Any]) -> list[int]:
    limit = max(cut.size for cut in cuts)
    return [n for n in range(1, limit + 1) if all(cut.fits(n) for cut in cuts)]


def _divisors(sizes: Iterable[int]) -> list[int]:
    sizes = list(sizes)
    limit = min(*sizes, _LARGEST_CHOICE)
    return [n for n in range(1, limit + 1) if all(size % n == 0 for size in sizes)]
